"""What distinguishes one decoder-only transformer from another, and the parameters it then has."""

from dataclasses import dataclass
from typing import Any

from specjax.models.experts import Routing
from specjax.models.norms import NORMS
from specjax.models.rope import Rope
from specjax.models.settings import check_numbers


@dataclass(frozen=True)
class DecoderConfig:
    """What distinguishes one model of the family from another; no field's default adds anything.

    ``windows`` holds one sliding window a layer (None: full attention), or is empty for none.
    ``ropes`` holds one rotation a layer (None: no positions), or is empty where all take ``rope``.
    ``learned_positions`` adds a table of ``max_position`` vectors to the embeddings.
    ``norm`` is a key of `specjax.models.norms.NORMS`; ``pre_norm`` and ``post_norm`` say where it
    stands, before or after attention and MLP. ``qk_norm`` norms each head's query and key,
    ``whole_qk_norm`` all heads together. ``attention_scale`` None is 1 / sqrt(head_dim). Soft caps
    are cap * tanh(x / cap). ``embedding_scale`` is rounded to the weights' dtype.
    ``output_bias`` is of attention's output and both projections of the MLP. ``experts`` replaces
    the MLP by routed ones of ``intermediate_size`` each. ``sinks`` adds a score a head to which no
    slot belongs.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: Rope | None = Rope()
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    ropes: tuple[Rope | None, ...] = ()
    learned_positions: bool = False
    norm: str = "rms"
    pre_norm: bool = True
    post_norm: bool = False
    whole_qk_norm: bool = False
    output_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    experts: Routing | None = None
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False

    def __post_init__(self):
        check_numbers(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if self.ropes and len(self.ropes) != self.num_layers:
            raise ValueError(f"{len(self.ropes)} ropes given for {self.num_layers} layers")
        if len({rope.partial for rope in self.layer_ropes if rope is not None}) > 1:
            raise ValueError("the layers rotate different parts of a head: not supported")
        if self.norm not in NORMS:
            raise ValueError(f"norm {self.norm!r} is not known; known: {', '.join(NORMS)}")

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.num_layers

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        return self.ropes or (self.rope,) * self.num_layers

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Length of each logical axis that a parameter may have."""
        return {
            "layers": self.num_layers,
            "vocab": self.vocab_size,
            "positions": self.max_position,
            "embed": self.hidden_size,
            "mlp": self.intermediate_size,
            "experts": self.experts.count if self.experts else 0,
            "kv_heads": self.num_kv_heads,
            "group": self.group,
            "group_qkv": self.group + 2,
            "head": self.head_dim,
            "gate_up": 2,
        }


ENDS = {
    "embed": ("vocab", "embed"),
    "positions": ("positions", "embed"),
    "norm": ("embed",),
    "norm_bias": ("embed",),
    "head": ("vocab", "embed"),
}
LAYER = {
    "attention_norm": ("embed",),
    "attention_norm_bias": ("embed",),
    "qkv": ("embed", "kv_heads", "group_qkv", "head"),
    "qkv_bias": ("kv_heads", "group_qkv", "head"),
    "q_norm": ("head",),
    "k_norm": ("head",),
    "sinks": ("kv_heads", "group"),
    "out": ("kv_heads", "group", "head", "embed"),
    "out_bias": ("embed",),
    "post_attention_norm": ("embed",),
    "mlp_norm": ("embed",),
    "mlp_norm_bias": ("embed",),
    "router": ("embed", "experts"),
    "router_bias": ("experts",),
    "experts_gate_up": ("experts", "embed", "gate_up", "mlp"),
    "experts_gate_up_bias": ("experts", "gate_up", "mlp"),
    "experts_down": ("experts", "mlp", "embed"),
    "experts_down_bias": ("experts", "embed"),
    "gate_up": ("embed", "gate_up", "mlp"),
    "up": ("embed", "mlp"),
    "up_bias": ("mlp",),
    "down": ("mlp", "embed"),
    "down_bias": ("embed",),
    "post_mlp_norm": ("embed",),
}
WHOLE_QK_NORM = {"q_norm": ("kv_heads", "group", "head"), "k_norm": ("kv_heads", "head")}


def parameter_axes(config: DecoderConfig, stacked: bool) -> dict[str, Any]:
    """Logical axes of every parameter, in the tree that the decoder takes."""
    absent = _absent(config)
    ends = {name: axes for name, axes in ENDS.items() if name not in absent}
    layer = {name: axes for name, axes in LAYER.items() if name not in absent}
    if config.whole_qk_norm:
        layer |= WHOLE_QK_NORM
    if stacked:
        return ends | {"layers": {name: ("layers", *axes) for name, axes in layer.items()}}
    return ends | {"layers": {index: dict(layer) for index in range(config.num_layers)}}


def _absent(config: DecoderConfig) -> set[str]:
    shifted = config.norm == "layer"
    qk_norm = config.qk_norm or config.whole_qk_norm
    routed = config.experts is not None
    biased = config.experts is not None and config.experts.biased
    present = {
        "positions": config.learned_positions,
        "norm_bias": shifted,
        "head": not config.tie_embeddings,
        "attention_norm": config.pre_norm,
        "attention_norm_bias": config.pre_norm and shifted,
        "qkv_bias": config.qkv_bias,
        "q_norm": qk_norm,
        "k_norm": qk_norm,
        "sinks": config.sinks,
        "out_bias": config.output_bias,
        "post_attention_norm": config.post_norm,
        "mlp_norm": config.pre_norm,
        "mlp_norm_bias": config.pre_norm and shifted,
        "router": routed,
        "router_bias": biased,
        "experts_gate_up": routed,
        "experts_gate_up_bias": biased,
        "experts_down": routed,
        "experts_down_bias": biased,
        "gate_up": config.gated and not routed,
        "up": not config.gated,
        "up_bias": not config.gated and config.output_bias,
        "down": not routed,
        "down_bias": config.output_bias and not routed,
        "post_mlp_norm": config.post_norm,
    }
    return {name for name, is_there in present.items() if not is_there}
