"""The demo's parts without its model: the block pool, the runner on a small random model, the check, the report."""

import json
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from paged_attn_ext.demo.blocks import BlockPool, OutOfBlocks, Sequence
from paged_attn_ext.demo.check import compare
from paged_attn_ext.demo.generate import generate
from paged_attn_ext.demo.model import Config, PagedLlama, _rotate

CONFIG = Config(num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, rope_theta=10000.0, norm_epsilon=1e-5)
VOCABULARY, HIDDEN, INNER = 50, 32, 48


def random_weights():
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(CONFIG.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (64, HIDDEN),
            prefix + "self_attn.k_proj.weight": (32, HIDDEN),
            prefix + "self_attn.v_proj.weight": (32, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, 64),
            prefix + "mlp.gate_proj.weight": (INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": (INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, INNER),
        }
    return {name: torch.randn(shape) * (0.3 if len(shape) == 2 else 1.0) for name, shape in shapes.items()}


class DenseLlama(PagedLlama):
    """The same model with plain causal attention over one whole sequence."""

    def _attend(self, layer, step, query, key, value):
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def dense_greedy(weights, prompt, count):
    from types import SimpleNamespace

    model, tokens = DenseLlama(CONFIG, weights, 1, 16), list(prompt)
    for _ in range(count):
        step = SimpleNamespace(tokens=torch.tensor(tokens), positions=torch.arange(len(tokens)))
        tokens.append(int(model.forward(step, torch.tensor([len(tokens) - 1]))[0].argmax()))
    return tokens


@pytest.mark.parametrize("chunk", [3, 16, 64])
def test_paged_generation_is_dense_generation(chunk):
    weights = random_weights()
    common = [int(t) for t in torch.randint(0, VOCABULARY, (35,))]
    prompts = [common + [1, 2, 3], common + [4], [5, 6], common[:32]]
    pool = BlockPool(24, 16)
    streamed = [[] for _ in prompts]
    sequences, statistics = generate(
        PagedLlama(CONFIG, weights, 24, 16), pool, prompts, 20, chunk, lambda i, token: streamed[i].append(token)
    )
    for sequence, prompt, seen in zip(sequences, prompts, streamed, strict=True):
        assert sequence.tokens == dense_greedy(weights, prompt, 20)
        assert seen == sequence.tokens[len(prompt) :]
    assert statistics.reused_tokens == 32 + 16  # two blocks of the second prompt, one of the last: its end is computed
    assert statistics.shared_blocks == 2 and statistics.decode_tokens == 4 * 19
    for sequence in sequences:
        sequence.release()
    assert pool.num_used == 0 and pool.share(tuple(common[:16])) is None


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 40)), max_size=30))
def test_pool_keeps_count(steps):
    """Sequences come, with one of a few prompts, and go: no block is lost, given twice, or shared with another's tokens."""
    pool, live = BlockPool(12, 8), []
    for come, kind, length in steps:
        if come:
            sequence = Sequence.start(pool, [kind] * length)
            try:
                sequence.reserve(length + 3)
            except OutOfBlocks:
                sequence.release()
                continue
            sequence.cached = length
            sequence.publish()
            live.append((kind, sequence))
        elif live:
            live.pop(length % len(live))[1].release()
        owners = {}
        for who, (kind, sequence) in enumerate(live):
            for i, block in enumerate(sequence.blocks):
                owners.setdefault(block, []).append((who, kind, i))
        assert pool.num_used == len(owners)
        assert pool.num_shared == sum(len(users) > 1 for users in owners.values())
        for users in owners.values():
            assert len({(kind, i) for _, kind, i in users}) == 1


def test_pool_says_when_it_is_empty_and_refuses_to_free_twice():
    pool = BlockPool(1, 8)
    block = pool.allocate()
    with pytest.raises(OutOfBlocks, match="all 1 blocks of 8 tokens"):
        pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="release: block is 0"):
        pool.release(block)


def test_compare_finds_the_first_difference_and_stops_at_ties():
    logits = torch.tensor([[5.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 1.0005, 0.0], [9.0, 0.0, 0.0]])
    assert compare([0, 1], logits[:2]).in_full
    assert compare([0, 2], logits[:2]).wrong == 1
    tied = compare([0, 1, 0, 0], logits)
    assert tied.tie == 2 and tied.equal and not tied.in_full and tied.compared == 2


def test_rotation_keeps_length_and_depends_on_distance_alone():
    frequency = 10000.0 ** (-torch.arange(0, 16, 2) / 16)

    def rotate(x, position):
        angle = torch.tensor([[float(position)]]) * frequency
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        return _rotate(x, cos, sin)

    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    assert rotate(q, 7).norm() == pytest.approx(q.norm().item(), rel=1e-5)
    near, far = ((rotate(q, a) * rotate(k, a - 3)).sum().item() for a in (5, 50))
    assert near == pytest.approx(far, abs=1e-4)


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "paged_attn_ext", *arguments], capture_output=True, text=True, timeout=120)


def test_info_as_json_and_text():
    info = json.loads(run("info", "--json").stdout)
    assert info["versions"]["torch"] == torch.__version__ and info["build"]["torch"] == torch.__version__
    assert info["cpu"]["instruction_set"] in info["cpu"]["available"]
    assert "PAGED_ATTN_BACKEND" in info["switches"]
    text = run("info").stdout
    assert "CPU kernels" in text and "PAGED_ATTN_CPU_ISA" in text and info["cpu"]["instruction_set"] in text


def test_demo_without_its_packages_says_what_to_install():
    code = "import sys; sys.modules['rich'] = None; from paged_attn_ext.__main__ import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and 'pip install "paged_attn_ext[demo]"' in done.stderr
