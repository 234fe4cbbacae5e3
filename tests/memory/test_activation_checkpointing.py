"""Memory methods change where activations live, and nothing else."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build, methods
from trainwright.memory import activation_checkpointing
from trainwright.models.decoder_config import DecoderModelConfig

CASES = [{"name": m.name} for m in methods("memory")] + [
    {"name": "activation_checkpointing", "mode": mode} for mode in ("none", "every_n", "selective")
]
every = pytest.mark.parametrize("settings", CASES, ids=lambda s: "-".join(map(str, s.values())))


class Dropped(nn.Module):
    """A block with dropout around it: its random numbers have to come again in the recomputation."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, *args, **kwargs):
        return nn.functional.dropout(self.block(x, *args, **kwargs), 0.3, self.training)


def decoder(n_layers=4, dropout=True):
    torch.manual_seed(0)
    model = DecoderModelConfig(dim=32, n_layers=n_layers, n_heads=2, n_kv_heads=1, ffn_dim=64).build(97, 64)
    if dropout:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Dropped(block)
    return model.train()


def tokens():
    return torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(1))


def gradients(model):
    torch.manual_seed(7)
    loss = model(tokens()).float().logsumexp(-1).mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


class Products(TorchDispatchMode):
    """Counts the matrix products of linear layers; attention's own are part of what is meant to be recomputed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def products(settings):
    model = decoder(dropout=False)
    build("memory", settings).apply(model)
    with Products() as counter:
        gradients(model)
    return counter.count


def saved_bytes(settings):
    """Bytes that autograd is given to keep, each storage once; what two passes share (weights, tables) aside."""
    model = decoder()
    build("memory", settings).apply(model)
    passes = []

    def pack(t):
        storage = t.untyped_storage()
        passes[-1][storage.data_ptr()] = storage  # kept, so that no address comes twice
        return t

    for _ in range(2):
        passes.append({})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            assert model(tokens()).requires_grad
    return sum(storage.nbytes() for at, storage in passes[1].items() if at not in passes[0])


def held_bytes(settings):
    """Bytes that are allocated in the forward pass and still held after it."""
    model = decoder()
    build("memory", settings).apply(model)
    gradients(model)  # what is made once, such as rotary tables, is there now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = model(tokens())
    assert out.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiled.key_averages())


def mode(name):
    return {"name": "activation_checkpointing", "mode": name, "n": 2}


@every
def test_loss_and_gradients_are_the_same(settings):
    plain, changed = decoder(), decoder()
    build("memory", settings).apply(changed)
    loss, expected = gradients(plain)
    again, got = gradients(changed)
    assert torch.equal(loss, again)
    for name, grad in expected.items():
        assert torch.equal(got[name], grad), name


@every
def test_names_and_modules_stay(settings):
    plain, changed = decoder(), decoder()
    build("memory", settings).apply(changed)
    assert list(plain.state_dict()) == list(changed.state_dict())
    assert [n for n, _ in plain.named_modules()] == [n for n, _ in changed.named_modules()]
    changed.load_state_dict(plain.state_dict())


@every
def test_without_gradients_nothing_changes(settings):
    plain, changed = decoder().eval(), decoder().eval()
    build("memory", settings).apply(changed)
    with torch.no_grad():
        assert torch.equal(plain(tokens()), changed(tokens()))


@every
def test_compiled_blocks(settings):
    plain, changed = decoder(2, dropout=False), decoder(2, dropout=False)
    build("memory", settings).apply(changed)
    for block in changed.blocks:
        block.compile(backend="aot_eager")
    _, expected = gradients(plain)
    _, got = gradients(changed)
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_fewer_bytes_are_saved():
    none, full, some = (saved_bytes(mode(m)) for m in ("none", "full", "every_n"))
    assert full < 0.3 * none
    assert full < some < 0.75 * none


def test_fewer_bytes_are_held():
    none, selective, full = (held_bytes(mode(m)) for m in ("none", "selective", "full"))
    assert full < 0.3 * none
    assert full < selective < 0.8 * none


def test_selective_recomputes_no_linear_layer():
    none, selective, full = (products(mode(m)) for m in ("none", "selective", "full"))
    assert selective == none
    assert full > none


@pytest.mark.parametrize("n, recomputed", [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_every_n(n, recomputed):
    per_block = (products(mode("full")) - products(mode("none"))) // 4
    count = products({"name": "activation_checkpointing", "mode": "every_n", "n": n}) - products(mode("none"))
    assert count == recomputed * per_block


@pytest.mark.parametrize("mode_name", ["full", "selective"])
def test_experts_and_packed_documents(mode_name):
    """Operators of our own inside the blocks; selective keeps their outputs."""
    results = {}
    for name in ("none", mode_name):
        torch.manual_seed(0)
        model = DecoderModelConfig(
            dim=32, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=64, n_experts=4, n_experts_per_token=2, moe_ffn_dim=32
        ).build(97, 64)
        build("memory", mode(name)).apply(model)
        calls = []

        class Own(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, calls=calls):
                if func.namespace == "trainwright" and "backward" not in str(func):
                    calls.append(str(func))
                return func(*args, **(kwargs or {}))

        doc_ids = (torch.arange(64).expand(2, 64) // 20).int()
        with Own(), torch.autocast("cpu", torch.bfloat16):
            model(tokens(), positions=torch.arange(64).expand(2, 64) % 20, doc_ids=doc_ids).float().sum().backward()
        results[name] = (len(calls), {n: p.grad for n, p in model.named_parameters()})
    (plain, expected), (count, got) = results.values()
    assert plain > 0
    assert count == plain if mode_name == "selective" else count > plain
    for name, grad in expected.items():
        assert (grad is None) == (got[name] is None)
        assert grad is None or torch.equal(got[name], grad), name


@pytest.mark.parametrize("settings", [{"mode": "half"}, {"n": 0}, {"mode": "full", "k": 1}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ConfigError):
        build("memory", {"name": "activation_checkpointing", **settings})


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
@every
def test_a_copy_trains_itself(settings, copied):
    """Checkpointing by a closure over the original's forward would train the original."""
    model = decoder()
    build("memory", settings).apply(model)
    other = copied(model)
    assert [type(b) for b in other.blocks] == [type(b) for b in model.blocks]
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    plain = decoder()
    plain.load_state_dict(other.state_dict())
    loss, expected = gradients(plain)
    again, got = gradients(other)
    assert torch.equal(loss, again)
    assert all(p.grad is None for p in model.parameters())
    for name, grad in expected.items():
        assert torch.equal(got[name], grad), name


@pytest.mark.parametrize("name", ["full", "every_n", "selective"])
def test_applying_twice(name):
    model = decoder(dropout=False)
    once = products(mode(name))
    build("memory", mode(name)).apply(model)
    build("memory", mode(name)).apply(model)
    with Products() as counter:
        gradients(model)
    assert counter.count == once
    for other in {"none", "full", "every_n", "selective"} - {name}:
        with pytest.raises(ConfigError, match="applied to this model before"):
            build("memory", mode(other)).apply(model)


def test_a_forward_on_the_instance_is_refused():
    model = decoder()
    model.blocks[1].forward = model.blocks[1].forward
    with pytest.raises(ConfigError, match=r"forward of a Dropped was replaced"):
        build("memory", mode("full")).apply(model)


@every
def test_sharded_afterwards(settings, tmp_path):
    plain, changed = decoder(), decoder()
    build("memory", settings).apply(changed)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in changed.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(changed, mesh=mesh)
        assert [n for n, _ in plain.named_parameters()] == [n for n, _ in changed.named_parameters()]
        loss, expected = gradients(plain)
        again, got = gradients(changed)
        assert torch.equal(loss, again)
        for name, grad in expected.items():
            assert torch.equal(got[name].full_tensor(), grad), name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "name",
    [
        "baddbmm",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ],
)
def test_selective_keeps(name):
    if not hasattr(torch.ops.aten, name):
        pytest.skip("not in this release of torch")
    policy = activation_checkpointing._keep_products(None, getattr(torch.ops.aten, name).default)
    assert policy == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
