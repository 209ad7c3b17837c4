"""Speculative decoding in plain PyTorch: drafts, their verification, and a cache that is cut row by row.

`generate` runs any `LanguageModel`; `TransformersModel` makes one of a causal model of transformers. Greedy output is
that of plain decoding, sampled output has its distribution.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.decoding.cache import RaggedCache
    from qsync_opt.runtimes.torch.decoding.drafting import Drafter, Drafts, LookupDrafter, ModelDrafter, TextIndex
    from qsync_opt.runtimes.torch.decoding.generation import FixedPolicy, Generation, Policy, generate
    from qsync_opt.runtimes.torch.decoding.models import LanguageModel, TransformersModel
    from qsync_opt.runtimes.torch.decoding.packed_linear import PackedLinear, activations, pack_linears
    from qsync_opt.runtimes.torch.decoding.sampling import Sampling
    from qsync_opt.runtimes.torch.decoding.verification import Verified, verify_greedily, verify_sampled
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Drafter", "Drafts", "FixedPolicy", "Generation", "LanguageModel", "LookupDrafter", "ModelDrafter", "PackedLinear",
    "Policy", "RaggedCache", "Sampling", "TextIndex", "TransformersModel", "Verified", "activations", "generate",
    "pack_linears", "verify_greedily", "verify_sampled",
]  # fmt: skip
