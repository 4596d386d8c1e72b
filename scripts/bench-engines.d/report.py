"""The table, and what had to be reached."""

import statistics


def percentile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * part))] if values else None


def figures(found):
    """One line of the table, from what was measured."""
    line = {}
    for kind in ("put", "get"):
        turns = [turn for turn in found.get(kind + "s", []) if turn["good"]]
        if turns:
            line[kind] = statistics.median(turn["good"] / turn["seconds"] for turn in turns)
            line[kind + "_to_disk"] = statistics.median(turn["good"] / (turn["seconds"] + turn["flush_seconds"]) for turn in turns)
            line[kind + "_cpu"] = sum(turn["cpu"] for turn in turns) / sum(turn["good"] for turn in turns) * 1024
            line[kind + "_machine_cpu"] = sum(turn["machine_cpu"] for turn in turns) / sum(turn["good"] for turn in turns) * 1024
    gets = found.get("gets", [])
    if gets:
        line["device_share"] = sum(turn["device_read"] for turn in gets) / (sum(turn["good"] for turn in gets) * (1 << 20) or 1)
        line["wrong"] = sum(len(turn["wrong"]) for turn in gets)
    for name in ("alone", "busy"):
        turns = found.get(f"{name}_ms", [])
        if turns:
            line[f"{name}_p50"] = statistics.median(percentile(turn, 0.5) for turn in turns)
            line[f"{name}_p99"] = statistics.median(percentile(turn, 0.99) for turn in turns)
    if "beside_mib" in found:
        line["beside_mib"] = statistics.median(found["beside_mib"])
    if "disk_ratio" in found:
        line["disk"] = found["disk_ratio"]
    return line


COLUMNS = (
    ("get", "cold get MiB/s", "{:.0f}"),
    ("put", "put MiB/s", "{:.0f}"),
    ("put_to_disk", "put and flush MiB/s", "{:.0f}"),
    ("get_cpu", "get CPU s/GiB", "{:.3f}"),
    ("put_cpu", "put CPU s/GiB", "{:.3f}"),
    ("get_machine_cpu", "get machine s/GiB", "{:.2f}"),
    ("put_machine_cpu", "put and flush machine s/GiB", "{:.2f}"),
    ("alone_p50", "1 MiB alone p50 ms", "{:.2f}"),
    ("alone_p99", "p99", "{:.2f}"),
    ("busy_p50", "beside puts p50 ms", "{:.2f}"),
    ("busy_p99", "p99", "{:.2f}"),
    ("beside_mib", "of MiB/s", "{:.0f}"),
    ("disk", "bytes on disk", "{:.2f}"),
)


def cell(value, shape):
    return "" if value is None else value if isinstance(value, str) else shape.format(value)


def table(results, entries):
    used = [column for column in COLUMNS if any(column[0] in figures(results.get(entry.name, {})) for entry in entries)]
    rows = [["", *(title for _, title, _ in used)], ["---"] * (len(used) + 1)]
    for entry in entries:
        found = results.get(entry.name, {})
        if "skipped" in found:
            rows.append([entry.name, found["skipped"].splitlines()[0]])
            continue
        line = figures(found)
        if entry.fixed and "disk" in line:
            line["disk"] = entry.fixed
        rows.append([entry.name, *(cell(line.get(key), shape) for key, _, shape in used)])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    fates = [entry for entry in entries if "killed" in results.get(entry.name, {})]
    if fates:
        text += "\n\n| | kill -9 in the middle of puts | one flipped bit on disk | power cut, by design |\n| --- | --- | --- | --- |"
        for entry in fates:
            found = results[entry.name]
            fate = found["killed"]
            if isinstance(fate, dict):
                fate = f"{fate['lost']} of {fate['acknowledged']} acknowledged lost, {fate['wrong']} wrong"
            text += f"\n| {entry.name} | {fate} | {found.get('flipped', '')} | {entry.power} |"
    return text


def musts(results, entries):
    """[(what, reached, wanted, whether)], for those that were measured."""
    lines = {entry.name: figures(results.get(entry.name, {})) for entry in entries}
    peers = [lines[entry.name] for entry in entries if not entry.ours]
    found = []

    def best(key, least=False):
        values = [line[key] for line in peers if key in line]
        return (min if least else max)(values) if values else None

    for entry in entries:
        line = lines[entry.name]
        if not entry.ours or not line:
            continue
        for key, what in (("get", "cold get"), ("put_to_disk", "put and flush"), ("put", "put, acknowledged")):
            wanted = 0.7 if entry.durable and key != "get" else 0.95
            if best(key) and key in line:
                found.append((f"{entry.name}: {what} / fastest peer", line[key] / best(key), f">= {wanted}", line[key] / best(key) >= wanted))
        for kind in ("get", "put"):
            fast = [other for other in peers if kind in other and other[kind] >= 0.9 * best(kind)]
            if fast and kind in line:
                ratio = line[f"{kind}_cpu"] / min(other[f"{kind}_cpu"] for other in fast)
                found.append((f"{entry.name}: {kind} CPU / leanest fast peer", ratio, "<= 1.0", ratio <= 1.0))
        if best("busy_p99", least=True) and "busy_p99" in line:
            ratio = line["busy_p99"] / best("busy_p99", least=True)
            found.append((f"{entry.name}: p99 beside puts / best peer", ratio, "<= 0.7", ratio <= 0.7))
    return found
