"""What must hold before anything starts, and the line that says what to do."""

from __future__ import annotations

import socket

import pytest

from cluster import memory, preflight
from cluster.memory import MIB
from cluster.preflight import Machine
from core import presets
from core.errors import ConfigError, ModelError, PreflightError
from tests.support import gguf_files
from worker.architectures import read_spec

GOOD = Machine(available_bytes=64 << 30, shm_bytes=1 << 30, absent=frozenset(), has_ibverbs=True)


def machine(**facts) -> Machine:
    return Machine(**{**{f: getattr(GOOD, f) for f in GOOD.__dataclass_fields__}, **facts})


def cpu(*overrides):
    return presets.read("cpu", ("router.port=0", "router.grpc_port=0", *overrides))


UNIFIED = presets.read("cpu-unified", ("router.port=0", "router.grpc_port=0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A real, very small model folder."""
    from cluster import gguf_import

    path = tmp_path_factory.mktemp("model")
    gguf_files.write_gguf(path / "tiny.gguf")
    gguf_import.convert(path / "tiny.gguf", path)
    return path


# --- packages and libraries ---


def test_missing_packages_name_the_extras():
    problem = preflight.packages_problem(cpu(), machine(absent=frozenset({"ray", "torch"})))
    assert problem == "missing packages ray, torch: pip install 'antiphon[cpu,serve,ray]'"


def test_only_what_the_configuration_uses_is_asked_for():
    lacking = machine(absent=frozenset({"ray", "mooncake"}), has_ibverbs=False)
    local = presets.read("cpu-unified", ("cluster.runtime=local",))
    assert preflight.packages_problem(local, lacking) is None
    unified = preflight.packages_problem(UNIFIED, lacking)
    assert unified is not None
    assert unified.startswith("missing packages ray:")
    assert preflight.ibverbs_problem(UNIFIED, lacking) is None


def test_an_unknown_word_lists_the_known_ones(folder):
    config = cpu("router.policy=luck", "router.tokenizer=runes")
    with pytest.raises(PreflightError) as caught:
        preflight.check(config, folder, GOOD)
    first, second = str(caught.value).splitlines()
    assert "'luck': choose one of" in first
    assert "'runes': choose one of" in second


def test_mooncake_without_its_library_names_the_package():
    problem = preflight.ibverbs_problem(cpu(), machine(has_ibverbs=False))
    assert problem is not None
    assert problem.endswith("apt-get install -y libibverbs1")
    assert preflight.ibverbs_problem(cpu(), GOOD) is None


@pytest.mark.parametrize(
    ("device", "devices", "words"),
    [
        ("mlx5_0", (), "no RDMA device mlx5_0 here; this machine has none"),
        ("mlx5_0,mlx5_9", ("mlx5_0",), "no RDMA device mlx5_9 here; this machine has mlx5_0"),
        ("", (), "this machine has no RDMA device"),
    ],
)
def test_an_rdma_device_that_is_not_there(device, devices, words):
    config = cpu("disagg.protocol=rdma", f"disagg.device='{device}'")
    here = machine(rdma_devices=frozenset(devices))
    assert words in (preflight.rdma_problem(config, here) or "")
    full = machine(rdma_devices=frozenset({"mlx5_0", "mlx5_9"}))
    assert preflight.rdma_problem(config, full) is None
    assert preflight.rdma_problem(cpu(), here) is None
    elsewhere = cpu("disagg.protocol=rdma", "cluster.address=head:6379")
    assert preflight.rdma_problem(elsewhere, here) is None


def test_this_environment_has_every_package():
    assert preflight.read_machine().absent == frozenset()


# --- the port ---


def test_a_busy_port_names_its_owner_and_the_key():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        problem = preflight.port_problem("127.0.0.1", port)
    assert problem is not None
    assert f"port {port} is in use (by " in problem
    assert "router.port=" in problem
    assert preflight.port_problem("127.0.0.1", port) is None


def test_a_busy_grpc_port_names_its_key_and_the_switch():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = f"router.grpc_port={server.getsockname()[1]}"
        problem = preflight.grpc_port_problem(presets.read("cpu", (port,)))
        off = presets.read("cpu", (port, "router.grpc=false"))
        assert preflight.grpc_port_problem(off) is None
    assert problem is not None
    assert "router.grpc_port=" in problem
    assert "router.grpc=false" in problem
    assert "router.port" not in problem


def test_a_host_that_is_not_ours_names_the_key():
    problem = preflight.port_problem("192.0.2.1", 0)  # reserved for documentation
    assert problem is not None
    assert "router.host" in problem


def test_listening_sockets_are_read_from_the_table():
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid timeout\n"
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 4711 1 x\n"
        "   1: 0100007F:1F40 0100007F:A000 01 00000000:00000000 00:00000000 0 0 0 4712 1 x\n"
        "   2: 0100007F:1F41 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 4713 1 x\n"
    )
    assert preflight.listening_inodes(table, 8000) == {"4711"}


# --- memory ---


def test_memory_is_weights_and_pools_of_all_ranks_and_the_processes(folder):
    config = cpu("decode.replicas=2", "prefill.kv_memory_mib=100", "decode.kv_memory_mib=10")
    needed = memory.memory_needed(config, read_spec(folder), 7 * MIB)
    assert needed["weights"] == 3 * 7 * MIB
    assert needed["KV"] == (100 + 2 * 10) * MIB
    assert needed["processes"] == 4 * memory.PROCESS_BYTES
    assert needed["Ray"] == memory.RAY_BYTES


def test_fp32_doubles_weights_and_a_pool_counted_in_tokens(folder):
    spec = read_spec(folder)
    per_token = gguf_files.LAYERS * 2 * gguf_files.KV_HEADS * 8
    half = memory.memory_needed(cpu("decode.kv_tokens=1000"), spec, MIB)
    full = memory.memory_needed(cpu("decode.kv_tokens=1000", "model.dtype=float32"), spec, MIB)
    assert half["KV"] == 1024 * MIB + 1000 * per_token * 2
    assert full["KV"] == 1024 * MIB + 1000 * per_token * 4
    assert full["weights"] == 2 * half["weights"]


def test_a_cluster_in_one_process_needs_no_ray(folder):
    needed = memory.memory_needed(cpu("cluster.runtime=local"), read_spec(folder), MIB)
    assert (needed["processes"], needed["Ray"]) == (memory.PROCESS_BYTES, 0)


def test_ranks_as_plain_processes_need_no_ray(folder):
    config = cpu("cluster.runtime=process")
    needed = memory.memory_needed(config, read_spec(folder), MIB)
    assert (needed["processes"], needed["Ray"]) == (3 * memory.PROCESS_BYTES, 0)
    no_ray = machine(absent=frozenset({"ray"}))
    assert preflight.packages_problem(config, no_ray) is None


def test_too_little_memory_says_how_much_and_what_to_change(folder):
    spec = read_spec(folder)
    needed = sum(memory.memory_needed(cpu(), spec, MIB).values())
    assert memory.memory_problem(cpu(), spec, MIB, needed) is None
    problem = memory.memory_problem(cpu(), spec, MIB, needed - 1)
    assert problem is not None
    assert "KV 2.0 GiB" in problem
    assert "kv_memory_mib" in problem


def test_a_rank_that_no_machine_holds_is_named_with_both_numbers_and_its_key(folder):
    config, spec = cpu("decode.kv_tokens=1000000000000"), read_spec(folder)
    for problem, has in (
        (memory.memory_problem(config, spec, MIB, GOOD.available_bytes), "64.0 GiB is available"),
        (memory.plan_problem(config, spec, MIB, 64 << 30), "this machine has 64.0 GiB"),
    ):
        assert problem is not None
        pool = 10**12 * gguf_files.LAYERS * 2 * gguf_files.KV_HEADS * 8 * 2 / 2**30
        assert problem.startswith("each decode rank needs about ")
        assert f"a KV pool of 1000000000000 tokens {pool:.1f} GiB" in problem
        assert problem.endswith(f"{has}: set a smaller decode.kv_tokens")
    wide = cpu("prefill.kv_memory_mib=99000000")
    problem = memory.memory_problem(wide, spec, MIB, GOOD.available_bytes)
    assert problem is not None
    assert problem.endswith("set a smaller prefill.kv_memory_mib")


def test_a_model_that_no_rank_holds_is_too_large(folder):
    problem = memory.plan_problem(cpu(), read_spec(folder), 1 << 40, 64 << 30)
    assert problem is not None
    assert problem.endswith("the model is too large for it")


def test_a_plan_compares_the_whole_where_all_ranks_are_here(folder):
    config, spec = cpu("decode.replicas=99"), read_spec(folder)
    problem = memory.plan_problem(config, spec, MIB, 64 << 30)
    assert problem is not None
    assert "all ranks together need about 1" in problem
    away = cpu("decode.replicas=99", "cluster.address=10.0.0.1:6379")
    assert memory.plan_problem(away, spec, MIB, 64 << 30) is None
    assert memory.plan_problem(cpu(), spec, MIB, 64 << 30) is None


def test_memory_of_other_machines_is_not_known_here(folder):
    config = cpu("decode.kv_tokens=1000000000000", "cluster.address=10.0.0.1:6379")
    assert memory.memory_problem(config, read_spec(folder), MIB, GOOD.available_bytes) is None


def test_the_memory_of_this_machine_is_read():
    assert preflight.read_machine().available_bytes <= memory.total_bytes() < 1 << 50


def test_memory_that_can_be_taken():
    text = "MemTotal: 9 kB\nMemAvailable:  2048 kB\n"
    assert memory.meminfo_bytes(text, "MemAvailable") == 2 * MIB
    assert memory.meminfo_bytes(text, "MemTotal") == 9 * 1024
    with pytest.raises(PreflightError, match="MemAvailable"):
        memory.meminfo_bytes("MemTotal: 9 kB\n", "MemAvailable")


def test_a_control_group_limits_but_its_page_cache_gives_way():
    stat = "anon 700\nfile 300\ninactive_file 250\n"
    assert memory.cgroup_available("1500\n", "1000\n", stat) == 750
    assert memory.cgroup_available("max\n", "1000\n", stat) > 1 << 60


def test_little_shared_memory_is_a_warning(folder):
    small = machine(shm_bytes=64 * MIB)
    (warning,) = preflight.check(cpu(), folder, small)
    assert "--shm-size" in warning
    assert preflight.check(cpu("cluster.runtime=local"), folder, small) == ()


# --- all together ---


def test_a_good_machine_has_nothing_to_say(folder):
    assert preflight.check(cpu(), folder, GOOD) == ()


def test_every_problem_is_said_at_once(folder):
    bad = machine(available_bytes=1, absent=frozenset({"ray"}), has_ibverbs=False)
    with pytest.raises(PreflightError) as caught:
        preflight.check(cpu(), folder, bad)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["missing", "Mooncake", "each"]


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        preflight.check(cpu(), tmp_path, GOOD)


# --- keys and TLS ---


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("router.admin_key=env:NOT_SET_ANYWHERE", r"router\.admin_key"),
        ("router.api_keys=[file:/no/such/file]", r"router\.api_keys\[0\]"),
    ],
)
def test_a_key_that_cannot_be_read_ends_the_start(override, words, folder):
    with pytest.raises(ConfigError, match=words):
        preflight.check(cpu(override), folder, GOOD)


def test_a_certificate_that_cannot_be_read_ends_the_start(folder):
    config = cpu("router.tls_cert=/no/such/file", "router.tls_key=/no/such/file")
    with pytest.raises(ConfigError, match=r"router\.tls_cert"):
        preflight.check(config, folder, GOOD)
