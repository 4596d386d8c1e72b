"""The transfer of a prefilled prompt to a decode engine, through files in the directory KVARTS_TRANSFER: SGLang's own transfers need libraries and
networks of devices. A file has the pages of a prompt as they lie in the prefill engine's pool on the device. The first token is in the name of the
request. The rest is SGLang's: queues, pools, and the states of a transfer, which are those of SGLang's backend `fake` that moves nothing.

The engines also tell here what SGLang asks of its storage (`told`), and a decode engine what it offloads, with the bytes on the device (`offloaded`)."""

import ctypes
import json
import os
import sys
import time
import types

PLACE = os.environ.get("KVARTS_TRANSFER", "")


def told(role):
    return os.path.join(PLACE, f"told.{role}")


def sent(room):
    return os.path.join(PLACE, f"sent.{room}")


def offloaded(rid):
    return os.path.join(PLACE, f"offloaded.{rid}")


def _tell(**fact):
    with open(told(os.environ["KVARTS_ROLE"]), "a", encoding="utf-8") as file:
        file.write(json.dumps(fact) + "\n")


def _places(args, pages):
    """Address and bytes of each buffer of each page."""
    return [(buffer + int(page) * size, size) for page in pages for buffer, size in zip(args.kv_data_ptrs, args.kv_item_lens)]


def bytes_of(args, pages):
    return b"".join(ctypes.string_at(*place) for place in _places(args, pages))


def install():
    from sglang.srt.disaggregation import decode, fake
    from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
    from sglang.srt.disaggregation.decode_kvcache_offload_manager import DecodeKVCacheOffloadManager

    class Sender(fake.FakeKVSender):
        def send(self, kv_indices, *others, **named):
            with open(sent(self.bootstrap_room), "ab") as file:
                file.write(bytes_of(self.kv_mgr.kv_args, kv_indices))
            super().send(kv_indices, *others, **named)

    class Receiver(fake.FakeKVReceiver):
        def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
            super().__init__(mgr, bootstrap_addr, bootstrap_room)
            self.room = bootstrap_room

        def send_metadata(self, kv_indices, *others, **named):
            with open(sent(self.room), "rb") as file:
                content = file.read()
            places = _places(self.kv_mgr.kv_args, kv_indices)
            if len(content) != sum(size for _, size in places):
                raise RuntimeError(f"{len(content)} bytes were sent for {len(kv_indices)} pages")
            at = 0
            for address, size in places:
                ctypes.memmove(address, content[at : at + size], size)
                at += size
            super().send_metadata(kv_indices, *others, **named)

    class Bootstrap(BaseKVBootstrapServer):
        def __init__(self, host, port):
            pass

    fake.FakeKVReceiver = Receiver
    # An engine that prefills refuses `fake`, so it runs with the name of another backend.
    named = dict(NixlKVManager=fake.FakeKVManager, NixlKVSender=Sender, NixlKVReceiver=Receiver, NixlKVBootstrapServer=Bootstrap)
    stand_in = types.ModuleType("sglang.srt.disaggregation.nixl")
    vars(stand_in).update(named)
    sys.modules[stand_in.__name__] = stand_in

    # The first token: the end of the request's name.
    decode._generate_fake_prefill_handoff_output_id = lambda req: int(req.rid.rsplit("-", 1)[1])

    offload = DecodeKVCacheOffloadManager.offload_kv_cache

    def telling(self, req):
        state = self.offloaded_state.get(req)
        before = state.inc_len if state else 0
        if not (done := offload(self, req)):
            return done
        begin = self._prefill_offloaded_len(req)
        begin, end = begin + before, begin + self.offloaded_state[req].inc_len
        slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx][begin:end]
        pages = (slots[:: self.page_size] // self.page_size).tolist()
        buffers = self.kv_cache.get_contiguous_buf_infos()
        args = types.SimpleNamespace(kv_data_ptrs=buffers[0], kv_item_lens=buffers[2])
        with open(offloaded(req.rid), "ab") as file:
            file.write(bytes_of(args, pages))
        tokens = (req.origin_input_ids + req.output_ids)[begin:end]
        _tell(do="offload", rid=req.rid, begin=begin, tokens=list(tokens), finished=req.finished())
        return done

    DecodeKVCacheOffloadManager.offload_kv_cache = telling

    from kvarts.sglang import Kvarts

    for name in ("batch_exists", "batch_exists_v2", "batch_get_v1", "batch_set_v1"):
        setattr(Kvarts, name, _storage(name, getattr(Kvarts, name)))


def _storage(name, method):
    def called(self, keys, *others, **named):
        began = time.monotonic()
        found = method(self, keys, *others, **named)
        good = found if isinstance(found, int) else found.kv_hit_pages if hasattr(found, "kv_hit_pages") else sum(found)
        _tell(do=name, keys=list(keys), good=good, seconds=time.monotonic() - began)
        return found

    return called
