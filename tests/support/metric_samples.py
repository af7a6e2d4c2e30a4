"""What a server's `/metrics` says, for tests to look up."""

from prometheus_client.parser import text_string_to_metric_families


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Give every series by its name and labels, but for the model's name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[(sample.name, *labels)] = sample.value
    return found
