"""Known blocks, their order of eviction, and the cache manager that hands them to tables."""

from __future__ import annotations

from runners.kv_cache.cache_manager import CacheManager

BLOCK = 4


def manager(blocks: int = 16, *, prefix_cache: bool = True) -> CacheManager:
    return CacheManager(blocks, BLOCK, prefix_cache=prefix_cache)


def run(cache: CacheManager, tokens: list[int], salt: str = "", key_id: str = "") -> tuple[list[int], int]:
    """Allocate, compute, commit and release a sequence; its blocks, and how many tokens were cached."""
    got = cache.allocate(cache.new_table(cache.root(salt, key_id)), tokens)
    assert got is not None
    table, cached = got
    block_ids = list(table.block_ids)
    cache.commit(table, tokens, len(tokens))
    cache.check_invariants([table])
    cache.release(table)
    cache.check_invariants([])
    return block_ids, cached


def test_full_blocks_of_an_equal_beginning_are_shared():
    cache = manager()
    first, _ = run(cache, list(range(10)))
    second, cached = run(cache, [*range(8), 99, 98, 97])
    assert cached == 8
    assert second[:2] == first[:2]


def test_the_last_block_of_a_prompt_known_as_a_whole_is_computed_again():
    cache = manager()
    first, _ = run(cache, list(range(8)))
    second, cached = run(cache, list(range(8)))
    assert cached == 4
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert run(cache, list(range(4)))[1] == 0


def test_a_block_is_known_only_once_its_step_is_committed():
    cache = manager()
    tokens = list(range(12))
    got = cache.allocate(cache.new_table(), tokens)
    assert got is not None
    table, _ = got
    assert cache.num_cached(cache.new_table(), tokens) == 0
    cache.commit(table, tokens, 7)
    assert cache.num_cached(cache.new_table(), tokens) == 4
    cache.commit(table, tokens, 8)
    assert cache.num_cached(cache.new_table(), tokens) == 8


def test_only_as_much_of_a_prompt_is_hashed_as_may_be_known():
    cache = manager(64)
    known = list(range(40))
    run(cache, known)
    for common, most in ((0, 1), (4, 3), (20, 7), (40, 15)):
        table = cache.new_table()
        assert cache.num_cached(table, known[:common] + list(range(1000, 1100))) == common
        assert common // BLOCK < len(table.digests) <= most


def test_a_salt_keeps_prompts_apart():
    cache = manager()
    run(cache, list(range(12)), "tenant a")
    assert run(cache, list(range(12)), "tenant b")[1] == 0
    assert run(cache, list(range(12)))[1] == 0
    assert run(cache, list(range(12)), "tenant a")[1] == 8


def test_keys_share_only_where_the_server_is_the_scope():
    per_key, per_server = manager(), CacheManager(16, BLOCK, shared_by_keys=True)
    for cache in (per_key, per_server):
        run(cache, list(range(12)), key_id="alice")
    assert run(per_key, list(range(12)), key_id="bob")[1] == 0
    assert run(per_key, list(range(12)), key_id="alice")[1] == 8
    assert run(per_server, list(range(12)), key_id="bob")[1] == 8
    assert run(per_server, list(range(12)), "tenant a", key_id="bob")[1] == 0


def test_a_salt_is_not_taken_for_a_key():
    cache = manager()
    run(cache, list(range(12)), key_id="alice")
    assert run(cache, list(range(12)), "alice")[1] == 0


def test_a_block_counts_with_everything_before_it():
    cache = manager()
    run(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(cache, [0, 2, 3, 4, 5, 6, 7, 8, 9])[1] == 0


def test_the_least_recently_used_goes_first_and_a_child_before_its_parent():
    cache = manager(6)
    run(cache, [*range(8), 100])  # two known blocks, one not full
    run(cache, [*range(20, 28), 100])
    run(cache, [*range(8), 100])  # used again: the other one is older now
    assert cache.prefix.num_idle == 4
    table, _ = cache.allocate(cache.new_table(), list(range(50, 62))) or (None, 0)  # needs three, two are free
    assert table is not None
    assert cache.prefix.evictions == 1
    assert cache.num_cached(cache.new_table(), [*range(20, 28), 100]) == 4
    assert cache.num_cached(cache.new_table(), [*range(8), 100]) == 8


def test_blocks_in_use_are_never_evicted():
    cache = manager(4)
    tokens = list(range(9))
    table, _ = cache.allocate(cache.new_table(), tokens) or (None, 0)
    assert table is not None
    cache.commit(table, tokens, 9)
    assert cache.allocate(cache.new_table(), list(range(50, 58))) is None
    assert cache.num_available == 1
    second, cached = cache.allocate(cache.new_table(), tokens) or (None, 0)
    assert second is not None
    assert cached == 8
    cache.check_invariants([table, second])
    cache.release(table)
    assert cache.num_cached(cache.new_table(), tokens) == 8
    cache.check_invariants([second])


def test_all_or_nothing_leaves_the_cache_as_it_was():
    cache = manager(4)
    run(cache, list(range(9)))
    before = cache.num_available
    assert cache.allocate(cache.new_table(), [*range(8), *range(100, 112)]) is None
    assert cache.num_available == before
    assert cache.num_cached(cache.new_table(), list(range(9))) == 8


def test_headroom_stays_available():
    cache = manager(4)
    assert cache.allocate(cache.new_table(), list(range(12)), headroom_blocks=2) is None
    assert cache.allocate(cache.new_table(), list(range(12)), headroom_blocks=1) is not None


def test_two_that_compute_the_same_side_by_side_share_nothing_and_lose_nothing():
    cache = manager()
    tokens = list(range(9))
    tables = [cache.allocate(cache.new_table(), tokens) for _ in range(2)]
    assert all(got is not None for got in tables)
    both = [got[0] for got in tables if got is not None]
    for table in both:
        cache.commit(table, tokens, 9)
    cache.check_invariants(both)
    for table in both:
        cache.release(table)
    cache.check_invariants([])
    assert cache.num_available == 16
    assert cache.prefix.num_known == 2


def test_switched_off_it_knows_nothing():
    cache = manager(prefix_cache=False)
    run(cache, list(range(12)))
    assert run(cache, list(range(12)))[1] == 0
    assert cache.prefix.num_known == 0


def test_a_lowered_quota_evicts_idle_blocks_at_once():
    cache = manager(8)
    run(cache, list(range(17)))
    assert cache.prefix.num_idle == 4
    cache.set_quota(2)
    assert cache.prefix.num_idle == 2
    assert cache.num_available == 2


def test_distrusted_blocks_are_found_by_nobody():
    cache = manager()
    tokens = list(range(12))
    table, _ = cache.allocate(cache.new_table(), tokens) or (None, 0)
    assert table is not None
    cache.commit(table, tokens, 8)
    cache.forget(table)
    assert cache.num_cached(cache.new_table(), tokens) == 0
    cache.commit(table, tokens, 12)
    assert cache.prefix.num_known == 0
    cache.release(table)
    assert cache.num_available == 16


def test_trim_gives_back_what_lies_beyond():
    cache = manager()
    tokens = list(range(14))
    table, _ = cache.allocate(cache.new_table(), tokens) or (None, 0)
    assert table is not None
    assert cache.trim(table, 10) == 10
    assert len(table.block_ids) == 3
    assert cache.trim(table, 8) == 8
    assert len(table.block_ids) == 2


def test_trim_never_leaves_a_known_block_to_be_written():
    cache = manager()
    tokens = list(range(14))
    table, _ = cache.allocate(cache.new_table(), tokens) or (None, 0)
    assert table is not None
    cache.commit(table, tokens, 14)
    assert cache.trim(table, 10) == 8, "tokens 8..11 are known to others by their content"
    assert len(table.block_ids) == 2
