"""Who is compared. `engine` names the environment, `durable` what an acknowledged put survives by design, which is read in the
source and not measured: a power cut cannot be made here."""

from dataclasses import dataclass

_TMP = "nothing is flushed: data that the kernel has not written is lost, and a file may have its name but not its bytes"
_DIRECT = "nothing is flushed: data was written to the device, but names of files and the device's cache may be lost"


@dataclass
class Entry:
    name: str
    engine: str
    module: str
    cls: str
    settings: dict
    power: str
    needs: str = ""
    server: bool = False
    ours: bool = False
    durable: bool = False
    #: Whether puts of one process can be beside gets of another.
    shared: bool = True
    #: Bytes on disk for a byte put, where files are made before.
    fixed: str = ""


def _kvarts(name, memory, durable=False):
    power = "acknowledged pages are flushed" if durable else "pages that were acknowledged shortly before may be lost, but never in part"
    settings = {"memory": memory, "durable": durable}
    return Entry(name, "kvarts", "kvarts_pages", "Kvarts", settings, power, "kvarts", server=True, ours=True, durable=durable)


def _lmcache(name, power, adapter, **more):
    settings = {"adapter": adapter, **more.pop("settings", {})}
    needs = more.pop("needs", "lmcache")
    return Entry(name, "lmcache", "lmcache_l2", "Adapter", settings, power, needs, **more)


def _raw_block(name, pages, **adapter):
    slot = (1 << 20) + 4096
    adapter = {"type": "raw_block", "device_path": "", "slot_bytes": slot, "use_odirect": True, **adapter}
    power = "only the index is flushed, once a minute when it is idle: later puts are lost"
    file = (pages + 64) * slot + (256 << 20)
    return _lmcache(name, power, adapter, settings={"file": file}, shared=False, fixed="1.00 and 256 MiB", needs="lmcache_rust_raw_block_io")


def _connectors():
    """Kvarts through its connectors: the same calls as the peer beside it."""
    tier = {"type": "KvartsTier", "module_path": "kvarts.vllm", "identity": {"revision": "1"}, "timeout": 120}
    plugin = {"type": "native_plugin", "module_path": "kvarts.lmcache", "class_name": "Kvarts"}
    plugin["adapter_params"] = {"revision": "1", "dtype": "bf16", "timeout": 120}
    power = "pages that were acknowledged shortly before may be lost, but never in part"
    return [
        Entry("kvarts in vLLM", "vllm", "vllm_tier", "Tier", {"tier": tier}, power, "vllm", server=True, ours=True),
        Entry("kvarts in LMCache", "lmcache", "lmcache_l2", "Adapter", {"adapter": plugin}, power, "lmcache", server=True, ours=True),
    ]


def all_of(pages):
    """Every contestant, for stores of at most this number of pages."""
    fs = {"type": "fs", "root_dir": "PLACE"}
    return [
        _kvarts("kvarts", "shared"),
        _kvarts("kvarts durable", "shared", durable=True),
        _kvarts("kvarts copied", "copied"),
        *_connectors(),
        Entry("vLLM fs", "vllm", "vllm_tier", "Tier", {"tier": fs}, _DIRECT, "vllm"),
        _lmcache("LMCache fs_native", _TMP, {"type": "fs_native"}),
        _lmcache("LMCache fs_native O_DIRECT", _DIRECT, {"type": "fs_native", "use_odirect": True}),
        _raw_block("LMCache raw_block", pages),
        _raw_block("LMCache raw_block io_uring", pages, io_engine="io_uring"),
        Entry("SGLang file", "sglang", "sglang_storage", "File", {}, _TMP, "sglang"),
        Entry("SGLang NIXL", "sglang", "sglang_storage", "Nixl", {"direct": True}, _DIRECT, "nixl"),
        Entry("SGLang NIXL buffered", "sglang", "sglang_storage", "Nixl", {"direct": False}, _TMP, "nixl"),
    ]
