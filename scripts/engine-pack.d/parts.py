"""Streams of files, cut into pieces that are compressed apart, and dealt into folders of a bounded size.

A stream is a tar of one directory. Its pieces are xz files of their own, so that all processors of the machine unpack them. The
index names every piece with its length and SHA-256: nothing is unpacked of which one is missing or differs. Python's own library
is all this needs."""

import concurrent.futures
import hashlib
import io
import json
import lzma
import os
import shutil
import tarfile

#: Bytes of a piece before it is compressed.
PIECE = 16 << 20
INDEX = "index.json"
FORMAT = 1


class Bad(Exception):
    """A part that is missing, is not what the index says, or belongs to another pack."""


def digest_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tar_of(directory):
    """The bytes of a directory, the same for the same content: by name, without times and owners."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for place, folders, names in os.walk(directory):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(place, name)
                info = tar.gettarinfo(path, os.path.relpath(path, directory))
                if not info.isreg():
                    raise Bad(f"{path} is not a regular file, so it cannot be packed")
                info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
                info.mode = 0o755 if info.mode & 0o100 else 0o644
                with open(path, "rb") as file:
                    tar.addfile(info, file)
    return out.getbuffer()


def cut(name, directory, out, preset=6, threads=None):
    """Writes the pieces of a stream to `out` and answers what the index says of it."""
    raw = tar_of(directory)
    begins = range(0, len(raw), PIECE)

    def piece(at):
        file = f"{name}-{at // PIECE:03}.xz"
        packed = lzma.compress(raw[at : at + PIECE], preset=preset, check=lzma.CHECK_CRC32)
        with open(os.path.join(out, file), "wb") as target:
            target.write(packed)
        return {"file": file, "bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}

    with concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        pieces = list(pool.map(piece, begins))
    return {"name": name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest(), "pieces": pieces}


def deal(streams, limit, beside=0):
    """Which pieces lie in which folder: in the order of the streams, each folder at most `limit` bytes, of which `beside` are taken
    in each by what runs there. The last stream is whole in the last folder, so that it can be carried again alone."""
    room = limit - beside
    folders, used = [[]], 0
    for stream in streams:
        sizes = [piece["bytes"] for piece in stream["pieces"]]
        whole = sum(sizes)
        if stream is streams[-1] and used + whole > room and used:
            folders.append([])
            used = 0
        if max(sizes, default=0) > room or (stream is streams[-1] and whole > room):
            raise Bad(f"{stream['name']}: {max(max(sizes), whole if stream is streams[-1] else 0)} bytes do not fit into the {room} bytes of a folder")
        for piece, size in zip(stream["pieces"], sizes):
            if used + size > room:
                folders.append([])
                used = 0
            folders[-1].append(piece["file"])
            used += size
    return folders


def write_index(out, streams, folders, made):
    index = {"format": FORMAT, "made": made, "streams": streams, "folders": folders}
    for number, files in enumerate(folders, 1):
        folder = os.path.join(out, str(number))
        os.makedirs(folder)
        for file in files:
            os.rename(os.path.join(out, file), os.path.join(folder, file))
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as target:
            json.dump(index, target, indent=1)
    return index


def read_index(folder):
    try:
        with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
            index = json.load(file)
    except (OSError, ValueError) as error:
        raise Bad(f"{folder} has no index: {error}") from None
    if index.get("format") != FORMAT:
        raise Bad(f"{folder} has an index of format {index.get('format')}, but this program reads format {FORMAT}: use the there.py of that folder")
    return index


def pieces_of(index):
    return {piece["file"]: piece for stream in index["streams"] for piece in stream["pieces"]}


def check(path, piece):
    """Raises `Bad` unless the file is the piece."""
    try:
        size = os.path.getsize(path)
    except OSError:
        raise Bad(f"{path} is missing: copy the folder again") from None
    if size != piece["bytes"]:
        raise Bad(f"{path} has {size} bytes, but {piece['bytes']} bytes according to the index: copy the folder again")
    if digest_of(path) != piece["sha256"]:
        raise Bad(f"{path} is damaged: its SHA-256 differs from the index; copy the folder again")


def keep(folder, place):
    """Takes what lies in a folder of the pack to `place`, where it stays for the next folder. Pieces that the index of this folder
    does not know are of an older pack, and go. Answers the names of the pieces that are still missing."""
    index = read_index(folder)
    known = pieces_of(index)
    store = os.path.join(place, "pieces")
    os.makedirs(store, exist_ok=True)
    here = [file for file in known if os.path.exists(os.path.join(folder, file))]
    for file in here:
        check(os.path.join(folder, file), known[file])
    for file in os.listdir(store):
        path = os.path.join(store, file)
        if file not in known or not is_piece(path, known[file]):
            os.unlink(path)
    for file in here:
        if not os.path.exists(os.path.join(store, file)):
            new = os.path.join(store, file + ".new")
            shutil.copyfile(os.path.join(folder, file), new)
            os.replace(new, os.path.join(store, file))
    new = os.path.join(place, INDEX + ".new")
    shutil.copyfile(os.path.join(folder, INDEX), new)
    os.replace(new, os.path.join(place, INDEX))
    return missing(place)


def is_piece(path, piece):
    try:
        check(path, piece)
    except Bad:
        return False
    return True


def missing(place):
    index = read_index(place)
    return [file for file in pieces_of(index) if not os.path.exists(os.path.join(place, "pieces", file))]


def join(place):
    """Unpacks every stream below `place`, once, and answers where each one is."""
    index = read_index(place)
    lost = missing(place)
    if lost:
        numbers = sorted({number for number, files in enumerate(index["folders"], 1) if set(files) & set(lost)})
        raise Bad(f"{len(lost)} pieces are missing, of the folders {', '.join(map(str, numbers))}: {' '.join(lost)}")
    found = {}
    for stream in index["streams"]:
        target = os.path.join(place, f"{stream['name']}-{stream['sha256'][:12]}")
        if not os.path.exists(target):
            unpack(os.path.join(place, "pieces"), stream, target)
        found[stream["name"]] = target
    return found


def unpack(store, stream, target):
    def piece(one):
        path = os.path.join(store, one["file"])
        check(path, one)
        with open(path, "rb") as file:
            return lzma.decompress(file.read())

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        raw = b"".join(pool.map(piece, stream["pieces"]))
    if len(raw) != stream["bytes"] or hashlib.sha256(raw).hexdigest() != stream["sha256"]:
        raise Bad(f"{stream['name']}: the SHA-256 of the joined pieces differs from the index: copy all folders of one pack again")
    new = target + ".new"
    shutil.rmtree(new, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        tar.extractall(new, filter="data")
    os.rename(new, target)
