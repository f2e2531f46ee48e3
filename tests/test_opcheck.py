"""The operators under PyTorch's own checks of schemas and fakes, and inside compiled graphs."""

import inspect

import pytest
import torch
from calls import VALID, B, D, G, N

from paged_attn_ext import ops

FP8_CACHES = {
    "key_cache": torch.zeros(N, G, D // 16, B, 16, dtype=torch.uint8),
    "value_cache": torch.zeros(N, G, D, B, dtype=torch.uint8),
    "kv_cache_dtype": "fp8",
    "k_scales": torch.ones(G),
    "v_scales": torch.ones(1),
}
needs_opcheck = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="opcheck came with torch 2.4")
# Functionalising operators that mutate lists or several tensors came with torch 2.5.
needs_compile = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5), reason="needs auto_functionalized of torch 2.5"
)


def positional(operator, arguments):
    """(args, kwargs) as the schema has them: a functionalised call must find each under its schema's name."""
    schema = getattr(torch.ops.paged_attn, operator).default._schema
    args, kwargs = [], {}
    for argument in schema.arguments:
        value = arguments.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def check(operator, arguments):
    args, kwargs = positional(operator, arguments)
    torch.library.opcheck(getattr(torch.ops.paged_attn, operator).default, args, kwargs)


@needs_opcheck
@pytest.mark.parametrize("operator", VALID)
def test_opcheck(operator):
    check(operator, VALID[operator]())


@needs_opcheck
@pytest.mark.parametrize(
    "operator", ["paged_attention_v1", "paged_attention_v2", "prefix_attention", "reshape_and_cache", "gather_blocks"]
)
def test_opcheck_with_fp8_caches_and_scale_tensors(operator):
    caches = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in FP8_CACHES.items()}
    check(operator, {**VALID[operator](), **caches})


@needs_opcheck
@pytest.mark.parametrize("operator", ["prefix_attention", "merge_attn_states"])
def test_opcheck_without_optional_outputs(operator):
    arguments = VALID[operator]()
    check(operator, {name: value for name, value in arguments.items() if name not in ("lse", "out_lse")})


MUTATED = {
    "paged_attention_v1": ["out"],
    "paged_attention_v2": ["out", "exp_sums", "max_logits", "tmp_out"],
    "prefix_attention": ["out", "lse"],
    "merge_attn_states": ["out", "out_lse"],
    "reshape_and_cache": ["key_cache", "value_cache"],
    "gather_blocks": ["key", "value"],
    "pack_blocks": ["buffer"],
    "scatter_blocks": ["caches"],
    "copy_blocks": ["key_caches", "value_caches"],
    "swap_blocks": ["dst"],
}


@pytest.mark.parametrize("operator", VALID)
def test_schemas_say_what_is_written_and_return_nothing(operator):
    schema = getattr(torch.ops.paged_attn, operator).default._schema
    assert [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write] == (
        MUTATED[operator]
    )
    assert list(schema.returns) == []


@pytest.mark.parametrize("operator", VALID)
def test_typed_functions_take_the_schemas_arguments(operator):
    """Same names, same order; the scale tensors are folded into the scales, so a call by position means the same."""
    schema = getattr(torch.ops.paged_attn, operator).default._schema
    theirs = [argument.name for argument in schema.arguments if argument.name not in ("k_scales", "v_scales")]
    signature = inspect.signature(getattr(ops, operator))
    assert list(signature.parameters) == theirs
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    for name, parameter in signature.parameters.items():
        assert (parameter.default is not parameter.empty) == (name in defaults)
        if name in defaults:
            assert parameter.default == defaults[name]


def store_and_attend(key, value, key_cache, value_cache, slots, query, tables, lengths):
    """A decode step as a model has it: an intermediate result goes in, the output is used, the caches are written."""
    out = torch.empty_like(query)
    ops.reshape_and_cache(key * 2, value + 1, key_cache, value_cache, slots)
    ops.paged_attention_v1(out, query, key_cache, value_cache, G, 0.25, tables, lengths, B, 20)
    return out * 3


@needs_compile
def test_compiled_store_and_decode():
    call = VALID["paged_attention_v1"]()
    key, value = torch.randn(2, G, D), torch.randn(2, G, D)
    slots = torch.tensor([4, 2 * B + 16 + 3])  # the last tokens of both sequences

    def arguments():
        caches = call["key_cache"].clone(), call["value_cache"].clone()
        return key, value, *caches, slots, call["query"], call["block_tables"], call["seq_lens"]

    eager_arguments, compiled_arguments = arguments(), arguments()
    expected = store_and_attend(*eager_arguments)
    compiled = torch.compile(store_and_attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*compiled_arguments), expected)
    for got, want in zip(compiled_arguments, eager_arguments, strict=True):
        assert torch.equal(got, want)
    assert not torch.equal(eager_arguments[2], call["key_cache"])


@needs_compile
@pytest.mark.parametrize("operator", [name for name in VALID if name not in ("paged_attention_v1", "reshape_and_cache")])
def test_compiled_operators_write_what_eager_ones_write(operator):
    def copy(arguments):
        return {
            name: [t.clone() for t in value]
            if isinstance(value, list)
            else value.clone()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in arguments.items()
        }

    eager = VALID[operator]()
    compiled = copy(eager)
    getattr(ops, operator)(**eager)

    def call(arguments):
        getattr(ops, operator)(**arguments)
        written = arguments[MUTATED[operator][0]]
        return written[0] + 1 if isinstance(written, list) else written + 1

    result = torch.compile(call, fullgraph=True, backend="aot_eager")(compiled)
    written = eager[MUTATED[operator][0]]
    assert torch.equal(result, (written[0] if isinstance(written, list) else written) + 1)
    for name in MUTATED[operator]:
        got, want = compiled[name], eager[name]
        pairs = zip(got, want, strict=True) if isinstance(want, list) else [(got, want)]
        assert all(torch.equal(a, b) for a, b in pairs), name
