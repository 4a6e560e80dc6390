"""What `glm-gpu bench` prints, from the documents of its parts."""

from glm_gpu.units import format_bytes


def part_text(document: dict) -> str:
    """One bench as a table: median, spread, share of its limit, and below it what can be trusted."""
    lines = [f"{document['bench']}   {document['subject']}"]
    names = max((len(row["name"]) for row in document["rows"]), default=0)
    lines += [f"  {row['name']:<{names}}  {_figure(row)}" for row in document["rows"]]
    if document["noise"] is not None:
        lines.append(f"noise floor {document['noise']:.1%}: so far apart are identical measurements in the median row")
    lines += document["notes"]
    read = document["storage_bytes_read"]
    machine = document["machine"]
    lines.append(
        f"peak {format_bytes(document['peak_rss_bytes'])} resident, "
        f"{'unknown bytes' if read is None else format_bytes(read)} read from disk, {document['seconds']:.0f} s, "
        f"{machine['threads']} threads, {machine['kernels']}, load {machine['load']:.1f}"
    )
    return "\n".join(lines)


def _figure(row: dict) -> str:
    value = f"{number(row['median']):>7} {row['unit']:<8}"
    if row["samples"] > 1:
        value += f" ({number(row['low'])} to {number(row['high'])})"
    if "share" in row:
        value = f"{value:<36} {row['share']:.0%} of {number(row['limit'])}, {row['limit_name']}"
    if "best_hit_rate" in row:
        value += f"; {row['hit_rate']:.0%} hits, at best {row['best_hit_rate']:.0%}"
    return value.rstrip()


def number(value: float) -> str:
    """Three significant digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3}f}"
