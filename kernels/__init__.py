"""Operations of the decoder: one public function an op in `kernels.ops`, references and device code behind it.

transformers looks for an installed package of this name and reads its version: 0.0.0 lies outside every range it
accepts, so it leaves this package alone. Nothing is imported here for the same reason.
"""

__version__ = "0.0.0"
