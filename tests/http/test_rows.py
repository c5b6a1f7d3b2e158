"""Which test shows each row of "what real servers got wrong": a row cannot lose its test without somebody noticing.

Rows about files and devices are shown below the API, where the fault would be made; `tests/http` has the others, and
runs them against any server: `python -m pytest tests/http/test_*_rows.py --base-url http://host:port`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROWS = {
    1: "http/test_text_rows.py::test_a_prompt_that_ends_inside_a_character",
    2: "http/test_text_rows.py::test_stray_bytes_become_replacement_characters",
    3: "http/test_text_rows.py::test_korean_and_chinese_stream_as_whole",
    5: "http/test_text_rows.py::test_sentencepiece_spaces_are_kept",
    7: "http/test_text_rows.py::test_special_tokens_keep_the_space_that_follows",
    9: "http/test_text_rows.py::test_a_stop_string_inside_a_token",
    11: "http/test_text_rows.py::test_nothing_after_the_stop_string",
    12: "http/test_tool_rows.py::test_a_call_cut_off_by_max_tokens",
    14: "http/test_tool_rows.py::test_finish_reason_of_calls",
    15: "http/test_text_rows.py::test_finish_reasons_are_openais",
    17: "http/test_stream_rows.py::test_include_usage",
    18: "http/test_stream_rows.py::test_streamed_usage_equals_whole_usage",
    20: "http/test_stream_rows.py::test_streamed_logprobs_equal_whole_logprobs",
    22: "http/test_stream_rows.py::test_infinite_logprobs_stay_json",
    23: "http/test_stream_rows.py::test_echo_with_logprobs",
    25: "http/test_refusal_rows.py::test_a_request_longer_than_the_context_is_refused",
    26: "http/test_refusal_rows.py::test_max_tokens_null_and_negative",
    27: "http/test_refusal_rows.py::test_an_empty_prompt_is_refused",
    29: "http/test_refusal_rows.py::test_logit_bias_outside_the_vocabulary",
    30: "http/test_refusal_rows.py::test_prompt_ids_outside_the_vocabulary",
    31: "http/test_refusal_rows.py::test_values_out_of_range",
    32: "http/test_refusal_rows.py::test_invalid_json",
    34: "http/test_refusal_rows.py::test_thousands_of_faults_make_a_short_error",
    35: "http/test_refusal_rows.py::test_unknown_model",
    37: "http/test_session_rows.py::test_a_client_gone_during_a_turn",
    38: "http/test_kill.py::test_sigstop_of_the_engine",
    40: "http/test_cache_rows.py::test_a_prompt_at_the_edge_of_a_block_four_times",
    42: "unit/execution/test_cuda_device.py::test_a_graph_does_what_its_eager_step_does_bit_for_bit",
    43: "http/test_independence.py::test_equal_text_whatever_happens_around_it",
    44: "unit/execution/test_executors.py::test_nan_in_one_row_fails_that_request_alone",
    45: "http/test_text_rows.py::test_end_markers_stop_and_stay_out_of_the_text",
    47: "http/test_text_rows.py::test_ignore_eos_goes_past_the_end_marker",
    49: "http/test_chat_rows.py::test_exactly_one_bos",
    50: "http/test_chat_rows.py::test_null_content_with_tool_calls",
    51: "http/test_chat_rows.py::test_a_template_that_refuses_a_role",
    53: "http/test_chat_rows.py::test_continue_final_message",
    54: "unit/models/test_builder.py::test_a_tied_head_is_the_embedding_even_where_the_file_repeats_it",
    55: "unit/models/test_decoder.py::test_scaled_rope_at_position_10000",
    56: "unit/loading/test_checkpoint.py::test_gguf_equals_safetensors",
    58: "unit/loading/test_gguf_reader.py::test_a_missing_shard_is_named",
    59: "unit/loading/test_checkpoint.py::test_gguf_equals_safetensors",
    61: "unit/text/test_gguf_vocab.py::test_user_defined_token_is_one_id",
    62: "unit/loading/test_gguf_reader.py::test_big_endian_is_refused_by_name",
}


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_its_test(row: int) -> None:
    path, _, name = ROWS[row].partition("::")
    assert name in functions_of(path)


def test_no_row_is_missing() -> None:
    gaps = {4, 6, 8, 10, 13, 16, 19, 21, 24, 28, 33, 36, 39, 41, 46, 48, 52, 57, 60}
    assert set(ROWS) == set(range(1, 63)) - gaps
