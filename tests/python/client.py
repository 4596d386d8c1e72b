"""A client that has the contract alone: registers a model, puts pages, finds, reads and deletes them.

Usage: client.py HOST:PORT. Exits with 0 and the word `good` if everything was as the contract says.
"""

import sys
import zlib

import grpc

from kvarts.v1 import models_pb2, models_pb2_grpc, reads_pb2, reads_pb2_grpc, store_pb2, store_pb2_grpc

PAGE = 4096


def identity():
    return models_pb2.Identity(
        model="pages", revision="python", tokenizer="none", adapter="none", kv_dtype="bf16",
        quantisation_recipe="none", quantisation_scales="none", rope="none", window="none",
        arrangement_engine="python", arrangement_layout="flat", arrangement_version="1", block_tokens=16,
    )


def messages(namespace, keys, pages, damage=False):
    yield store_pb2.PutRequest(header=store_pb2.PutHeader(namespace=namespace, keys=b"".join(keys)))
    data, offset = b"".join(pages), 0
    while data:
        piece, data = data[:3000], data[3000:]
        crc = zlib.crc32(piece) ^ damage
        yield store_pb2.PutRequest(data=store_pb2.PutData(offset=offset, crc32=crc, data=piece))
        offset += len(piece)


def read(reads, namespace, keys):
    blocks, whole, end = {}, {}, None
    request = reads_pb2.ReadRequest(namespace=namespace, keys=b"".join(keys))
    for reply in reads.Get(request, timeout=30):
        assert end is None, "a message after the end"
        kind = reply.WhichOneof("part")
        if kind == "data":
            data = reply.data
            assert zlib.crc32(data.data) == data.crc32, "bytes were damaged on the way"
            span = blocks.setdefault((data.first_block, data.blocks), bytearray())
            assert len(span) == data.offset, "pieces out of order"
            span += data.data
        elif kind == "block":
            whole[reply.block.block] = True
        elif kind == "end":
            end = reply.end
    assert end is not None, "the stream was cut off"
    pages = {}
    for (first, count), span in blocks.items():
        for block in range(count):
            pages[first + block] = bytes(span[block * PAGE:(block + 1) * PAGE])
    return {block: pages[block] for block in whole}, end


def main(address):
    channel = grpc.insecure_channel(address)
    models = models_pb2_grpc.ModelsStub(channel)
    store, reads = store_pb2_grpc.StoreStub(channel), reads_pb2_grpc.ReadsStub(channel)
    asked = models_pb2.RegisterModelRequest(identity=identity(), opaque_page_bytes=PAGE)
    namespace = models.RegisterModel(asked, timeout=30).namespace
    keys = [bytes([number]) * 32 for number in range(1, 4)]
    pages = [bytes([number * 7]) * PAGE for number in range(1, 4)]
    put = store.Put(messages(namespace, keys, pages), timeout=30)
    assert [outcome.what for outcome in put.outcomes] == [store_pb2.PutOutcome.STORED] * 3, put
    found, end = read(reads, namespace, keys + [b"x" * 32])
    assert found == dict(enumerate(pages)) and end.usable_blocks == 3, end
    assert [failure.block for failure in end.failures] == [3], end
    here = store.Exists(store_pb2.ExistsRequest(namespace=namespace, keys=b"".join(keys)), timeout=30)
    assert list(here.presence) == [store_pb2.ExistsReply.HERE] * 3, here
    of_keys = store_pb2.DeleteRequest.Keys(keys=keys[0])
    assert store.Delete(store_pb2.DeleteRequest(namespace=namespace, of_keys=of_keys), timeout=30).blocks == 1
    try:
        store.Put(messages(namespace, keys[:1], pages[:1], damage=True), timeout=30)
        raise SystemExit("damaged bytes were taken")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    print("good")


if __name__ == "__main__":
    main(sys.argv[1])
