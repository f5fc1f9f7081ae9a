"""The types and ranges of the fields of `config.json` that families read: one table for all.

A value that no model can have is refused here, with the field's name, before a family reads it.
"""

from typing import Any

from engine.errors import CheckpointError
from engine.json_fields import (
    FLAG,
    OBJECT,
    TEXT,
    Fields,
    Kind,
    either,
    every,
    number,
    problem_of,
    shown_name,
    whole,
)

_MOST_LAYERS = 10_000
_MOST_EXPERTS = 1 << 16
_MOST_NUMBER = 1e15
_LEAST, _MOST_FACTOR = 1e-9, 1e9  # beyond these, products of float32 are 0 or infinite
_SHARE: Kind = (
    "a number from 0 to below 1",
    lambda value: type(value) in (int, float) and 0 <= value < 1,
)
_SIZE, _COUNT, _LAYERS = whole(1), whole(0), whole(1, _MOST_LAYERS)
_EXPERTS = whole(1, _MOST_EXPERTS)
_SMALL, _POSITIVE, _FACTOR = number(0, 1), number(0, _MOST_NUMBER), number(_LEAST, _MOST_FACTOR)
_ID = whole(0)
FIELDS: Fields = {
    "architectures": every(TEXT),
    "eos_token_id": either(_ID, every(_ID)),
    "layer_types": every(TEXT),
    "mlp_only_layers": every(_COUNT),
    "no_rope_layers": every(FLAG),
    "activation_sparsity_pattern": every(_SHARE),
    "intermediate_size": either(_SIZE, every(_SIZE)),
    "partial_rotary_factor": _SMALL,
    "moe_layer_freq": either(_COUNT, every(_COUNT)),
    **dict.fromkeys(
        ("model_type", "hidden_act", "hidden_activation", "activation", "topk_method"), TEXT
    ),
    **dict.fromkeys(
        ("text_config", "attn_config", "rope_scaling", "rope_parameters", "quantization_config",
         "compression_config"),
        OBJECT,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group",
         "topk_group"),
        _EXPERTS,
    ),
    **dict.fromkeys(
        ("hidden_size", "n_embed", "d_model", "num_attention_heads", "n_head", "n_heads",
         "num_key_value_heads", "num_kv_heads", "head_dim", "vocab_size", "sliding_window_pattern",
         "max_position_embeddings", "seq_length", "max_seq_len", "decoder_sparse_step",
         "expansion_ratio", "ffn_hidden_size", "hidden_size_per_layer_input", "kv_lora_rank",
         "laurel_rank", "moe_intermediate_size", "no_rope_layer_interval", "qk_nope_head_dim",
         "qk_rope_head_dim", "shared_expert_intermediate_size", "v_head_dim",
         "vocab_size_per_layer_input", "altup_num_inputs", "original_max_position_embeddings"),
        _SIZE,
    ),
    **dict.fromkeys(
        ("sliding_window", "max_window_layers", "first_k_dense_replace", "n_shared_experts",
         "num_kv_shared_layers", "altup_active_idx", "num_ln_in_parallel_attn", "q_lora_rank"),
        _COUNT,
    ),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _SMALL),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), _POSITIVE),
    **dict.fromkeys(
        ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
         "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier",
         "routed_scaling_factor", "swiglu_alpha", "swiglu_limit"),
        _FACTOR,
    ),
    **dict.fromkeys(
        ("alibi", "altup_correct_scale", "apply_residual_connection_post_layernorm", "multi_query",
         "new_decoder_architecture", "norm_topk_prob", "parallel_attn", "rope_interleave",
         "tie_word_embeddings", "use_bidirectional_attention", "use_qk_norm", "use_sliding_window"),
        FLAG,
    ),
}  # fmt: skip
_ROPE: Fields = {
    "partial_rotary_factor": _SMALL,
    "truncate": FLAG,
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(("short_factor", "long_factor", "divisors"), every(_FACTOR)),
    **dict.fromkeys(("rope_theta", "original_max_position_embeddings"), _POSITIVE),
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"),
        _FACTOR,
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim"), number(-_LEAST, _MOST_FACTOR)),
}  # fmt: skip
_ATTENTION: Fields = {  # of MPT
    "attn_type": TEXT,
    **dict.fromkeys(("alibi", "qk_ln", "prefix_lm"), FLAG),
    **dict.fromkeys(("alibi_bias_max", "softmax_scale"), _FACTOR),
    "clip_qkv": number(-_LEAST, _MOST_FACTOR),
}
_GROUP_SIZE = whole(-1)
_QUANTISED: Fields = {
    "config_groups": OBJECT,
    "dynamic": either(OBJECT, FLAG),
    "weight_block_size": either(TEXT, every(_SIZE)),
    **dict.fromkeys(
        ("quant_method", "format", "fmt", "checkpoint_format", "version", "activation_scheme"),
        TEXT,
    ),
    **dict.fromkeys(("bits", "w_bit"), _SIZE),
    **dict.fromkeys(("group_size", "q_group_size"), _GROUP_SIZE),
    **dict.fromkeys(("sym", "zero_point", "desc_act", "is_marlin_format"), FLAG),
    **dict.fromkeys(("modules_to_not_convert", "ignore"), every(TEXT)),
}
_SCHEME: Fields = {
    "num_bits": _SIZE,
    "group_size": _GROUP_SIZE,
    "block_structure": either(TEXT, every(_SIZE)),
    "actorder": either(TEXT, FLAG),
    **dict.fromkeys(("type", "strategy"), TEXT),
    **dict.fromkeys(("symmetric", "dynamic"), FLAG),
}
_KINDS = ("full_attention", "sliding_attention")  # of layers
_GROUP: Fields = dict.fromkeys(("weights", "input_activations", "output_activations"), OBJECT)


# Numbers of which a null is no value of its own, as "no window" and "no cap" are.
_NEVER_NULL = {"first_k_dense_replace", "max_window_layers"} | {
    name for name, kind in FIELDS.items() if kind in (_SMALL, _POSITIVE, _FACTOR)
} - {"attn_logit_softcapping", "final_logit_softcapping"}


def without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    """Without the numbers that are null, which have the family's defaults."""
    kept = {k: v for k, v in raw.items() if v is not None or k not in _NEVER_NULL}
    text = kept.get("text_config")
    return kept | {"text_config": without_nulls(text)} if text else kept


def check_fields(raw: dict[str, Any], prefix: str = "") -> None:
    """Raises CheckpointError naming the first field whose value no model can have. A null stands for
    the family's default."""
    _check(raw, FIELDS, prefix)
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(raw.get(name) or {}, f"{prefix}{name}.")
    _check(raw.get("attn_config") or {}, _ATTENTION, f"{prefix}attn_config.")
    for name in ("quantization_config", "compression_config"):
        _check_quantised(raw.get(name) or {}, f"{prefix}{name}.")
    if raw.get("text_config"):
        check_fields(raw["text_config"], f"{prefix}text_config.")
    vocab, ends = raw.get("vocab_size"), raw.get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if vocab is not None and end is not None and end >= vocab:
            raise CheckpointError(
                f"config.json: {prefix}eos_token_id is {end}: the vocabulary ends at {vocab - 1}"
            )


def _check_rope(given: dict[str, Any], prefix: str) -> None:
    """One scaling, or one for each kind of layer."""
    kinds = {
        kind
        for kind, part in given.items()
        if kind in _KINDS or (isinstance(part, dict) and kind not in _ROPE)
    }
    _check(given, _ROPE, prefix)
    for kind in sorted(kinds):
        _check(given, {kind: OBJECT}, prefix)
        _check(given[kind] or {}, _ROPE, f"{prefix}{kind}.")


def _check_quantised(declared: dict[str, Any], prefix: str) -> None:
    _check(declared, _QUANTISED, prefix)
    for name, group in (declared.get("config_groups") or {}).items():
        place = f"{prefix}config_groups."
        if not isinstance(group, dict):
            raise CheckpointError(f"config.json: {place}{shown_name(name)} must be an object")
        _check(group, _GROUP, f"{place}{name}.")
        for part in _GROUP:
            _check(group.get(part) or {}, _SCHEME, f"{place}{name}.{part}.")


def _check(raw: dict[str, Any], fields: Fields, prefix: str) -> None:
    problem = problem_of(raw, fields, prefix)
    if problem:
        raise CheckpointError(f"config.json: {problem}")
