"""How many prompt tokens of a workload a prefix cache could have at best."""

from collections.abc import Iterator

from specdec.bench.workload import Blocks, EarlierReply, PlannedRequest, Workload

_Node = int
_Content = tuple[str, int]


def count_reusable_tokens(workload: Workload) -> int:
    """Tokens of the prompts that stood at the same place, behind the same tokens, in an earlier prompt or reply.

    Requests count in the order of the trace, and the cache is thought to keep everything. One that evicts, keeps whole
    pages only, or sees requests at the same time reuses less.

    Args:
        workload: Of filler; the tokens of a text only the server can count.
    """
    tree = _PrefixTree()
    return sum(tree.add(request) for request in workload.requests)


class _PrefixTree:
    """A node is a prefix. An edge is a block or a reply, and how many of its tokens the prefix takes."""

    def __init__(self) -> None:
        self._children: dict[tuple[_Node, _Content, int], _Node] = {}
        self._most_tokens: dict[tuple[_Node, _Content], int] = {}

    def add(self, request: PlannedRequest) -> int:
        """Put in a prompt and its reply; gives how many of the prompt's tokens were there."""
        node, num_found, is_known = 0, 0, True
        for content, num_tokens in _contents(request):
            if is_known:
                num_found += min(num_tokens, self._most_tokens.get((node, content), 0))
                is_known = (node, content, num_tokens) in self._children
            node = self._step(node, content, num_tokens)
        self._step(node, ("reply", request.index), request.num_output_tokens)
        return num_found

    def _step(self, node: _Node, content: _Content, num_tokens: int) -> _Node:
        self._most_tokens[node, content] = max(num_tokens, self._most_tokens.get((node, content), 0))
        return self._children.setdefault((node, content, num_tokens), len(self._children) + 1)


def _contents(request: PlannedRequest) -> Iterator[tuple[_Content, int]]:
    for piece in request.prompt:
        if isinstance(piece, Blocks):
            for place, number in enumerate(piece.block_numbers):
                yield ("block", number), min(piece.block_tokens, piece.num_tokens - place * piece.block_tokens)
        elif isinstance(piece, EarlierReply):
            yield ("reply", piece.request_index), piece.num_tokens
