"""The roles of kinds of operators: adjustable, dependent or fixed, in a table that users can change.

Torch operations are listed by their ATen name (lower case; in-place ``relu_`` counts as ``relu``), ONNX operators by
their type (capitals). Unknown kinds are fixed and named in a warning. ``decide_role`` applies type promotion on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from qsync_opt.errors import ModelError
from qsync_opt.io import check_member
from qsync_opt.model.graph import Role


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = _names("linear matmul mm bmm addmm baddbmm gemm conv conv1d conv2d conv3d")
"""Matrix products and convolutions that have 8-bit kernels."""
ATTENTION = _names("scaled_dot_product_attention attention")
LOOKUPS = _names("embedding gather")
"""Selection of rows of a parameter by index."""

SAVES_OUTPUT = _names("""
    relu relu6 sigmoid tanh softmax log_softmax logsoftmax hardsigmoid exp sqrt rsqrt reciprocal leaky_relu leakyrelu
    elu selu softsign
""")
"""Kinds whose derivative is a function of their result."""
SAVES_NOTHING = _names("""
    input constant constantofshape add sub rsub neg cat concat split chunk getitem gather slice select narrow pad
    transpose permute t expand tile repeat contiguous clone cast to mean reducemean sum reducesum averagepool avg_pool2d
    globalaveragepool adaptive_avg_pool1d adaptive_avg_pool2d reshape view flatten unflatten squeeze unsqueeze identity
    stack roll flip upsample resize depthtospace spacetodepth
""")
"""Kinds whose backward pass needs shapes only: linear with constant coefficients, or data movement."""
BYTE_MASKS = _names("dropout")
"""Kinds that keep a mask of one byte per element of the result."""
INDEX_MASKS = _names("maxpool max_pool1d max_pool2d max_pool3d max_pool2d_with_indices globalmaxpool")
"""Kinds that keep their input and an index per element of the result."""

# The plan picks their precision: the kinds that the kernels can execute in several.
ADJUSTABLE = """
    linear matmul mm bmm addmm baddbmm einsum embedding scaled_dot_product_attention
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    MatMul Gemm Conv ConvTranspose Einsum Attention
"""

# They always run in FP32. First normalizations, softmax and losses, whose sums and quotients need the mantissa; then
# functions whose result leaves the range of FP16 or loses its meaning near 0; then accumulations; then products and
# indexed writes for which there is no low-precision implementation here or that refuse operands of unlike types; last,
# sampling at coordinates, which 8 bits of mantissa place beside the right pixel of an image of some hundred.
FIXED = """
    input
    layer_norm rms_norm group_norm instance_norm batch_norm local_response_norm normalize cosine_similarity
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    softmax log_softmax softmin gumbel_softmax multi_margin_loss
    cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss ctc_loss
    cosine_embedding_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss soft_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss
    exp exp2 expm1 log log2 log10 log1p logsumexp logcumsumexp logaddexp logaddexp2 pow square reciprocal rsqrt
    acos asin cosh sinh tan acosh asinh atanh erfc erfinv lgamma digamma softplus logit xlogy
    sum nansum cumsum prod cumprod norm linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm
    var std var_mean std_mean dist cdist pdist renorm trace histc
    mv dot vdot inner outer addmv addr addbmm tensordot bilinear chain_matmul linalg_multi_dot kron
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell embedding_bag embedding_renorm prelu
    index_put index_add index_copy index_fill scatter scatter_add scatter_reduce masked_scatter
    linalg_inv linalg_solve linalg_cholesky linalg_qr linalg_svd linalg_eigh linalg_det inverse matrix_exp
    view_as_complex complex polar _weight_norm _weight_norm_interface
    fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 stft istft
    grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator

    LayerNormalization RMSNormalization GroupNormalization InstanceNormalization BatchNormalization LRN
    LpNormalization MeanVarianceNormalization SimplifiedLayerNormalization SkipLayerNormalization
    Softmax LogSoftmax Hardmax SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss
    Exp Log Pow Reciprocal Acos Asin Cosh Sinh Tan Acosh Asinh Atanh Softplus
    ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare CumSum Sum
    LSTM GRU RNN PRelu ScatterElements ScatterND Scatter TensorScatter Det DFT STFT MelWeightMatrix
    QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul QLinearConv
    GridSample AffineGrid
"""

# Kinds that multiply matrices or convolve, so that they have FLOPs; all adjustable ones but the look-up are such.
_PRODUCTS = """
    linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    mv dot vdot inner outer addmv addr addbmm tensordot bilinear chain_matmul linalg_multi_dot kron cdist
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
ATEN_PRODUCTS = frozenset(_PRODUCTS.split())

# They keep their input's format by type promotion: element-wise, data movement, selection, pooling, sources of data.
DEPENDENT = """
    relu relu6 gelu silu mish hardtanh hardswish hardsigmoid leaky_relu elu selu celu glu rrelu threshold
    sigmoid logsigmoid log_sigmoid tanh tanhshrink softshrink hardshrink softsign
    add sub rsub mul div true_divide floor_divide remainder fmod neg negative abs sign sgn positive addcmul addcdiv
    lerp clamp clamp_min clamp_max clip minimum maximum fmin fmax floor ceil round trunc frac nan_to_num
    sqrt erf sinc sin cos atan atan2 arctan2 view_as_real real imag conj resolve_conj angle
    dropout dropout1d alpha_dropout feature_dropout feature_alpha_dropout native_dropout bernoulli
    view _unsafe_view reshape reshape_as view_as flatten unflatten squeeze unsqueeze permute transpose swapaxes
    swapdims movedim moveaxis t numpy_T mT mH adjoint matrix_H expand expand_as broadcast_to repeat repeat_interleave
    tile roll flip rot90 contiguous clone alias detach lift_fresh lift_fresh_copy to type_as _to_copy copy
    select slice narrow split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk hsplit vsplit dsplit
    unbind getitem cat concat concatenate stack hstack vstack dstack column_stack unfold im2col fold col2im
    diagonal diag diag_embed as_strided channel_shuffle pixel_shuffle pixel_unshuffle pad constant_pad_nd
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    index index_select gather take take_along_dim masked_select masked_fill where tril triu
    fill zero zeros zeros_like ones ones_like full full_like empty empty_like new_zeros new_ones new_full new_empty
    new_tensor tensor scalar_tensor eye arange linspace logspace rand rand_like randn randn_like randint randint_like
    randperm multinomial normal uniform exponential normal_functional item
    mean median amax amin max min aminmax argmax argmin topk sort argsort kthvalue cummax cummin mode unique
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d
    upsample_trilinear3d _upsample_nearest_exact2d
    eq ne lt le gt ge equal isnan isinf isfinite isin isclose allclose logical_and logical_or logical_xor logical_not
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift any all count_nonzero
    nonzero one_hot bucketize searchsorted broadcast_tensors meshgrid cartesian_prod cumulative_trapezoid
    __and__ __or__ __xor__ __lshift__ __rshift__

    Relu LeakyRelu Elu Selu Celu ThresholdedRelu Gelu Swish Mish HardSwish HardSigmoid Sigmoid Tanh Softsign Shrink
    Add Sub Mul Div Mod Neg Abs Sign Clip Min Max Mean Floor Ceil Round Sqrt Erf Sin Cos Atan BitShift
    Dropout Identity Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Concat Split SplitToSequence SequenceAt
    SequenceConstruct SequenceEmpty SequenceInsert SequenceErase SequenceLength ConcatFromSequence Slice Gather
    GatherElements GatherND Pad Where Compress Cast CastLike Constant ConstantOfShape Range Shape Size EyeLike
    RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial OneHot NonZero Trilu
    ReduceMean ReduceMax ReduceMin ArgMax ArgMin TopK Unique ReverseSequence RotaryEmbedding
    AveragePool MaxPool GlobalAveragePool GlobalMaxPool GlobalLpPool LpPool MaxUnpool MaxRoiPool RoiAlign
    Resize Upsample DepthToSpace SpaceToDepth Col2Im CenterCropPad Optional OptionalGetElement
    Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not BitwiseAnd BitwiseOr BitwiseXor BitwiseNot
    IsNaN IsInf NonMaxSuppression
"""


ROLE_TABLE: Mapping[str, Role] = MappingProxyType(
    {
        kind: role
        for role, kinds in ((Role.ADJUSTABLE, ADJUSTABLE), (Role.FIXED, FIXED), (Role.DEPENDENT, DEPENDENT))
        for kind in kinds.split()
    }
)
"""Kind of operator to role, without a user's changes."""


def base_kind(op_type: str) -> str:
    """The kind of ``op_type`` in the table: that of the pure form for in-place operations."""
    return op_type[:-1] if op_type.endswith("_") and not op_type.endswith("__") else op_type


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTable:
    """The role table with a user's changes.

    ``by_type`` maps kinds of operators to roles. ``by_name`` maps patterns of operator names (as in ``fnmatch``:
    ``*`` also matches dots and slashes) to roles; the first pattern that matches wins, and names win over kinds.
    Only kinds that are adjustable in `ROLE_TABLE` can be adjustable: no other can run in several precisions. Make
    dependent kinds fixed by kind (``by_type``), because runtimes enforce FP32 by kind.

    Examples:
        >>> table = RoleTable(by_type={"embedding": Role.FIXED}, by_name={"head/*": Role.FIXED})
        >>> table.lookup("head/linear", "linear"), table.lookup("body/linear", "linear")
        (<Role.FIXED: 'fixed'>, <Role.ADJUSTABLE: 'adjustable'>)
    """

    by_type: Mapping[str, Role] = field(default_factory=dict)
    by_name: Mapping[str, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for field_name, what in (("by_type", "operation"), ("by_name", "name pattern")):
            roles = {
                key: check_member(Role, role, f"role of {what} {key!r}", error=ModelError)
                for key, role in getattr(self, field_name).items()
            }
            object.__setattr__(self, field_name, MappingProxyType(roles))
        for kind, role in self.by_type.items():
            if role is Role.ADJUSTABLE:
                _check_adjustable(kind, f"operation {kind!r}")

    def lookup(self, name: str, op_type: str) -> Role | None:
        """The role of an operator by this table, or None if its kind is unknown.

        Raises:
            ModelError: A name pattern makes an operator adjustable whose kind cannot be.
        """
        kind = base_kind(op_type)
        for pattern, role in self.by_name.items():
            if fnmatchcase(name, pattern):
                if role is Role.ADJUSTABLE:
                    _check_adjustable(kind, f"operator {name!r} (pattern {pattern!r})")
                return role
        return self.by_type.get(op_type, self.by_type.get(kind, ROLE_TABLE.get(kind)))

    def check_patterns(self, names: tuple[str, ...]) -> None:
        """Refuse name patterns that match none of the operators.

        Raises:
            ModelError: A pattern matches none.
        """
        for pattern in self.by_name:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ModelError(
                    f"role pattern {pattern!r} fits no operator: names look like {names[0]!r} and {names[-1]!r}"
                )


def _check_adjustable(kind: str, what: str) -> None:
    if ROLE_TABLE.get(kind) is not Role.ADJUSTABLE:
        raise ModelError(f"{what} cannot be adjustable: only these can: {', '.join(ADJUSTABLE.split())}")


def decide_role(
    listed: Role | None, *, delivers_floating: bool, reads_floating: bool, reads_state: bool, casts_to_full: bool
) -> Role:
    """The role of an operator, given the role of its kind.

    Args:
        listed: From ``RoleTable.lookup``; None for an unknown kind.
        delivers_floating: Whether any result is floating point.
        reads_floating: Whether it reads a floating-point result of another operator.
        reads_state: Whether it reads a floating-point parameter, buffer or constant of at least one dimension.
        casts_to_full: Whether it converts to FP32 explicitly (``x.float()``).

    Returns:
        ``listed``, except that unknown kinds, integer operators and sources of floating-point data are fixed, as are
        dependent operators that read FP32 state or convert to FP32: type promotion makes their results FP32.
    """
    if listed is None or not (delivers_floating or reads_floating):
        return Role.FIXED
    if listed is Role.ADJUSTABLE:
        return Role.ADJUSTABLE if delivers_floating else Role.FIXED
    if listed is Role.DEPENDENT and delivers_floating and (reads_state or casts_to_full or not reads_floating):
        return Role.FIXED
    return listed
