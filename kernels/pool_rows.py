"""Physical rows of chosen positions: what `IndexSelect` writes beside them.

    row_TK = page_RP[r, position // S] * S + position % S        r = request of the query row; -1 stays -1

T = query rows, Q of each request, K = positions of a row, R = requests, P = pages of a request, S = tokens of a page.
"""

import torch


def pool_rows_ref(position_TK: torch.Tensor, page_RP: torch.Tensor, *, page_size: int) -> torch.Tensor:
    """Define the rows: [T, K].

    Args:
        position_TK: Positions of each row's request, an integer dtype, -1 where there is none.
        page_RP: Physical pages of each request, of a dtype that holds the rows; T is a multiple of R.
        page_size: S.
    """
    request_T1 = torch.arange(len(position_TK), device=page_RP.device)[:, None] // (len(position_TK) // len(page_RP))
    row_TK = page_RP[request_T1, position_TK.clamp(min=0) // page_size] * page_size + position_TK % page_size
    return torch.where(position_TK < 0, -1, row_TK)
