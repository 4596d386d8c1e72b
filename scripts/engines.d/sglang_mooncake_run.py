"""SGLang's own storage of Mooncake on a real pool of the host, over Kvarts in Mooncake's place: `sglang_mooncake_run.py SOCKET`. Run by scripts/engines."""

import sys
import tempfile

from kvarts import mooncake

place = tempfile.TemporaryDirectory()
mooncake.write(place.name)
sys.path.insert(0, place.name)

import sglang_host  # noqa: E402
import torch  # noqa: E402
from sglang_host import PAGE, keys, where  # noqa: E402


def storage(layout):
    made, pool = sglang_host.storage("mooncake", {"master_server_address": f"kvarts:{sys.argv[1]}"}, layout)
    assert type(made.store).__module__ == "kvarts.mooncake", "another store"
    return made, pool


for layout in ("page_first", "page_first_direct"):
    first, pool = storage(layout)
    sglang_host.filled(pool)
    first.clear()
    assert first.batch_exists(keys) == 0, "absent pages were found"
    assert first.batch_set_v1(keys[:20], where[: 20 * PAGE]) == [True] * 20, "not stored"
    second, other = storage(layout)
    other.kv_buffer.zero_()
    assert second.batch_exists(keys) == 20, "not found"
    assert second.batch_get_v1(keys, where) == [True] * 20 + [False] * 12, "not loaded"
    for page in range(20):
        assert torch.equal(pool.get_data_page(page * PAGE), other.get_data_page(page * PAGE)), f"page {page} has wrong bytes"
    for one in (first, second):
        one.store.close()
    print(f"{layout}: 20 pages equal", flush=True)
