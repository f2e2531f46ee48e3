"""v1, v2 or the fallback: the decision, its settings, and the workspace behind v2."""

import threading

import pytest
import torch

from paged_attn_ext import settings, workspace
from paged_attn_ext.dispatch import BI_V100, DeviceProfile, choose_decode, profile_for


def test_bi_v100_holds_80_blocks():
    assert BI_V100.max_blocks == 80


@pytest.mark.parametrize(
    "num_seqs, num_heads, num_kv_heads, max_seq_len, path",
    [
        (1, 6, 1, 512, "v1"),  # one partition
        (1, 6, 1, 513, "v2"),
        (1, 6, 1, 0, "v1"),
        (79, 6, 1, 65536, "v2"),  # 79 blocks: the card has room
        (80, 6, 1, 65536, "v1"),  # 80 fill it
        (20, 24, 4, 65536, "v1"),
        (1, 100, 1, 65536, "v2"),  # 100 query heads share one block
    ],
)
def test_decision_counts_blocks_per_kv_head(num_seqs, num_heads, num_kv_heads, max_seq_len, path):
    choice = choose_decode(num_seqs, num_heads, num_kv_heads, max_seq_len, BI_V100, {})
    assert choice.path == path and choice.reason and choice.partitions == -(-max_seq_len // 512)


def test_settings_of_the_decision():
    assert choose_decode(1, 100, 1, 65536, BI_V100, {"PAGED_ATTN_DISPATCH": "heads"}).path == "v1"
    limit = {"PAGED_ATTN_PYTORCH_THRESHOLD": "1000"}
    assert choose_decode(1, 1, 1, 1001, BI_V100, limit).path == "pytorch"
    assert choose_decode(1, 1, 1, 1000, BI_V100, limit).path == "v2"


@pytest.mark.parametrize("switch, value", [(settings.BACKEND, "cuda"), (settings.DISPATCH, "x"), (settings.PRECISION, "half")])
def test_a_bad_value_names_variable_value_and_choices(switch, value):
    with pytest.raises(ValueError) as error:
        settings.get(switch, {switch.name: value})
    assert all(text in str(error.value) for text in (switch.name, value, *switch.choices))


def test_a_bad_number_is_refused():
    with pytest.raises(ValueError, match="PAGED_ATTN_WORKSPACE_MIB is '-1'"):
        settings.get_int(settings.WORKSPACE_MIB, {"PAGED_ATTN_WORKSPACE_MIB": "-1"})


def test_cpu_profile_is_one_block_per_thread():
    assert profile_for(torch.device("cpu")) == DeviceProfile("cpu", torch.get_num_threads(), 1, 1)


@pytest.fixture
def empty_workspace():
    workspace.clear()
    yield
    workspace.clear()


def test_workspace_is_reused_and_grows(empty_workspace):
    cpu = torch.device("cpu")
    exp_sums, max_logits, tmp_out = workspace.partition_workspace(2, 3, 4, 8, cpu)
    assert exp_sums.shape == max_logits.shape == (2, 3, 4) and tmp_out.shape == (2, 3, 4, 8)
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in (exp_sums, max_logits, tmp_out))
    exp_sums.fill_(1), max_logits.fill_(2), tmp_out.fill_(3)  # they do not overlap
    assert (exp_sums == 1).all() and (max_logits == 2).all() and (tmp_out == 3).all()
    assert workspace.partition_workspace(1, 3, 4, 8, cpu)[0].data_ptr() == exp_sums.data_ptr()
    before = workspace.cached_bytes()
    workspace.partition_workspace(4, 3, 4, 8, cpu)
    assert workspace.cached_bytes() == 2 * before


def test_workspace_is_bounded(empty_workspace, monkeypatch):
    monkeypatch.setenv("PAGED_ATTN_WORKSPACE_MIB", "1")
    cpu = torch.device("cpu")
    large = workspace.partition_workspace(1, 8, 64, 1024, cpu)
    assert large[2].numel() == 8 * 64 * 1024 and workspace.cached_bytes() == 0
    workspace.partition_workspace(1, 1, 64, 1024, cpu)
    assert 0 < workspace.cached_bytes() <= 2**20


def test_threads_do_not_share_a_workspace(empty_workspace):
    cpu = torch.device("cpu")
    pointers, together = [], threading.Barrier(2)

    def work():
        together.wait()
        pointers.append(workspace.partition_workspace(1, 1, 1, 8, cpu)[0].data_ptr())
        together.wait()

    workers = [threading.Thread(target=work) for _ in range(2)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert len(set(pointers)) == 2
