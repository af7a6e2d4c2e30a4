"""Every metric by name, with the names under which other engines chart the same thing.

A metric whose meaning is that of one of vLLM has its name behind our own prefix, its labels and its unit, so that a
dashboard made for vLLM shows this server once `vllm:` is replaced by `specdec:`.
"""

from typing import NamedTuple

PREFIX = "specdec:"


class MetricName(NamedTuple):
    """One metric.

    Attributes:
        name: Without the prefix; a counter's is exported with `_total` behind it.
        kind: "counter", "gauge" or "histogram".
        help: What it counts.
        labels: Beside `model_name`.
        vllm: vLLM's name of the same; empty where it has none.
        sglang: SGLang's; a gauge of it that can be computed from ours is written as that computation.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    vllm: str = ""
    sglang: str = ""


METRICS = (
    MetricName(
        "num_requests_running",
        "gauge",
        "Choices that hold a slot of the engine.",
        vllm="vllm:num_requests_running",
        sglang="sglang:num_running_reqs",
    ),
    MetricName(
        "num_requests_waiting",
        "gauge",
        "Choices that wait for a slot.",
        vllm="vllm:num_requests_waiting",
        sglang="sglang:num_queue_reqs",
    ),
    MetricName(
        "kv_cache_usage_perc",
        "gauge",
        "Share of the KV pages that running requests hold, 0 to 1.",
        vllm="vllm:kv_cache_usage_perc",
        sglang="sglang:token_usage",
    ),
    MetricName("kv_pages", "gauge", "KV pages by state: used, cached (only kept for later prompts), free.", ("state",)),
    MetricName("kv_pages_quarantined", "gauge", "KV pages that nobody uses but a prefill may still write to."),
    MetricName(
        "num_preemptions",
        "counter",
        "How often a running request's pages were taken away.",
        vllm="vllm:num_preemptions",
        sglang="sglang:num_retracted_requests_total",
    ),
    MetricName(
        "prompt_tokens",
        "counter",
        "Prompt tokens of requests that have begun to answer, cached ones included.",
        vllm="vllm:prompt_tokens",
        sglang="sglang:prompt_tokens_total",
    ),
    MetricName(
        "generation_tokens",
        "counter",
        "Tokens delivered.",
        vllm="vllm:generation_tokens",
        sglang="sglang:generation_tokens_total",
    ),
    MetricName(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        vllm="vllm:prefix_cache_queries",
    ),
    MetricName(
        "prefix_cache_hits",
        "counter",
        "Prompt tokens that the prefix cache supplied.",
        vllm="vllm:prefix_cache_hits",
        sglang="sglang:cached_tokens_total",
    ),
    MetricName(
        "request_success",
        "counter",
        "Choices that ended, by reason: stop, length, abort, error.",
        ("finished_reason",),
        vllm="vllm:request_success",
        sglang="sum: sglang:num_requests_total; abort: sglang:num_aborted_requests_total",
    ),
    MetricName(
        "spec_decode_num_drafts",
        "counter",
        "Rounds of a request in which drafts were verified.",
        vllm="vllm:spec_decode_num_drafts",
    ),
    MetricName(
        "spec_decode_num_draft_tokens",
        "counter",
        "Drafts verified.",
        vllm="vllm:spec_decode_num_draft_tokens",
    ),
    MetricName(
        "spec_decode_num_accepted_tokens",
        "counter",
        "Drafts accepted, before a stop cuts the run.",
        vllm="vllm:spec_decode_num_accepted_tokens",
        sglang="1 + accepted / drafts: sglang:spec_accept_length; accepted / draft tokens: sglang:spec_accept_rate",
    ),
    MetricName(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Drafts accepted, by their place in the draft.",
        ("position",),
        vllm="vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    MetricName(
        "time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token.",
        vllm="vllm:time_to_first_token_seconds",
        sglang="sglang:time_to_first_token_seconds",
    ),
    MetricName(
        "inter_token_latency_seconds",
        "histogram",
        "Between two rounds that gave a request tokens.",
        vllm="vllm:inter_token_latency_seconds",
        sglang="sglang:inter_token_latency_seconds",
    ),
    MetricName(
        "request_time_per_output_token_seconds",
        "histogram",
        "Of a request, from its first token to its last, by the number of tokens behind the first.",
        vllm="vllm:request_time_per_output_token_seconds",
    ),
    MetricName(
        "e2e_request_latency_seconds",
        "histogram",
        "From a request's arrival to its last token.",
        vllm="vllm:e2e_request_latency_seconds",
        sglang="sglang:e2e_request_latency_seconds",
    ),
    MetricName(
        "request_queue_time_seconds",
        "histogram",
        "From a request's arrival to its slot, tokenising included.",
        vllm="vllm:request_queue_time_seconds",
        sglang="sglang:queue_time_seconds",
    ),
    MetricName(
        "request_prefill_time_seconds",
        "histogram",
        "From a request's slot to its first token.",
        vllm="vllm:request_prefill_time_seconds",
    ),
    MetricName(
        "request_decode_time_seconds",
        "histogram",
        "From a request's first token to its last.",
        vllm="vllm:request_decode_time_seconds",
    ),
    MetricName(
        "request_prompt_tokens",
        "histogram",
        "Tokens of a prompt.",
        vllm="vllm:request_prompt_tokens",
    ),
    MetricName(
        "request_generation_tokens",
        "histogram",
        "Tokens delivered to a choice.",
        vllm="vllm:request_generation_tokens",
    ),
    MetricName("http_responses", "counter", "Answers by HTTP status.", ("status",)),
    MetricName("audit_decisions", "counter", "Decisions of each rank that were compared with the first rank's."),
    MetricName("audit_disagreements", "counter", "Compared decisions that differed, before agreement.", ("rank",)),
    MetricName(
        "kv_shard_tokens",
        "gauge",
        "Tokens of running choices whose target KV a dcp rank owns; those of shared pages count for each choice.",
        ("rank",),
    ),
    MetricName(
        "kv_shard_balance",
        "gauge",
        "Mean of kv_shard_tokens over the ranks, by the largest: 1 is even, also with none at all.",
    ),
    MetricName(
        "kv_empty_shards", "gauge", "Pairs of a running choice with KV and a dcp rank that owns no token of it."
    ),
    MetricName(
        "dcp_merges", "counter", "Merges of partial attention over dcp ranks, as far as the first one has timed them."
    ),
    MetricName(
        "dcp_merge_seconds", "counter", "Seconds of the first rank in these merges, waiting for the others included."
    ),
    MetricName(
        "prefill_prompts",
        "counter",
        "Prompts asked of prefills, by outcome: received, lost, abandoned.",
        ("outcome",),
        sglang="lost: sglang:num_transfer_failed_reqs_total",
    ),
    MetricName(
        "prefill_wait_seconds", "counter", "From asking a prefill to the prompt's arrival, of all that arrived."
    ),
    MetricName(
        "prefill_state",
        "gauge",
        "1 for the state that a prefill is in, else 0: connecting, ready, silent, refused, down.",
        ("prefill", "state"),
    ),
    MetricName(
        "prefill_queued_tokens", "gauge", "Prompt tokens that a prefill was given and has not computed.", ("prefill",)
    ),
    MetricName(
        "prefill_transfers",
        "counter",
        "Prompts given to a prefill, by outcome: started, arrived, failed.",
        ("prefill", "outcome"),
    ),
    MetricName("prefill_connections", "counter", "Times that a prefill answered a call.", ("prefill",)),
    MetricName("prefill_prompt_tokens", "counter", "Prompt tokens that arrived from a prefill.", ("prefill",)),
    MetricName("prefill_cached_tokens", "counter", "Of these, tokens whose KV the prefill had already.", ("prefill",)),
    MetricName(
        "prefill_stale_messages",
        "counter",
        "Messages of a prefill of another epoch, or about a transfer that was over.",
        ("prefill",),
    ),
    MetricName("decode_groups", "gauge", "Decode groups whose line to this server is up."),
    MetricName("transfers_running", "gauge", "Prompts of decode groups that are being computed or sent."),
    MetricName("transfers", "counter", "Prompts of decode groups, by outcome: started, done, failed.", ("outcome",)),
    MetricName("transfer_prompt_tokens", "counter", "Prompt tokens that were handed over."),
    MetricName("transfer_cached_tokens", "counter", "Of these, tokens whose KV was here from earlier prompts."),
    MetricName(
        "transfer_stale_messages", "counter", "Messages of groups of another epoch, or about a transfer that was over."
    ),
    MetricName(
        "transfer_bytes",
        "counter",
        "Bytes written, by rank here, rank of the group, and kind of entry.",
        ("source_rank", "destination_rank", "kind"),
    ),
    MetricName(
        "transfer_descriptors",
        "counter",
        "Contiguous pieces written, as above.",
        ("source_rank", "destination_rank", "kind"),
    ),
    MetricName(
        "transfer_seconds",
        "counter",
        "Seconds of writes, as above, by phase: queued behind others, sending. All kinds of a write count its seconds.",
        ("source_rank", "destination_rank", "kind", "phase"),
    ),
)
METRIC_BY_NAME = {metric.name: metric for metric in METRICS}
