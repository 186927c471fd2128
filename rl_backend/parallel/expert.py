"""Expert parallelism: each rank has some of the experts, or a part of each, and tokens travel to them."""

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel.collectives import all_to_all_rows
from rl_backend.primitive.experts import ExpertTokens, RowOwners, copy_rows, sort_by_expert, sum_rows, with_owners
from rl_backend.primitive.grouped_linear import spread_evenly
from rl_backend.primitive.router import Routing


class AllToAllDispatcher:
    """Experts are spread over the ranks of a group; each copy of a token is sent to its expert and its result comes back.

    Rank ``ep * etp_size + etp`` of the group has the experts from ``ep * E / ep_size`` on, each cut into ``etp_size``
    parts of its intermediate features. Every part sees all tokens of its expert and returns a partial sum; the rank that
    a token came from adds the parts up. No token is dropped, and ranks may have different numbers of tokens, none
    included.

    Deterministic, forward and backward: an expert's rows are in the order of the sending ranks and their tokens, and what
    a token gets is summed in the order of its choices. A call, what it returns as ``combine``, and the backward pass of
    each are collectives.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, ep_size: int, etp_size: int = 1) -> None:
        self.group = group
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.etp_size = etp_size

    def __call__(self, x: Tensor, routing: Routing, owners: RowOwners | None = None) -> ExpertTokens:
        """(T, hidden_size) -> the copies that this rank's experts work on, of all ranks' tokens.

        ``ExpertTokens.counts`` has ``E / ep_size`` numbers, of this rank's experts. Whose copies they are is told by counts
        of each expert and owner, and where adapters drop inputs, by their draws.
        """
        order = sort_by_expert(*with_owners(routing.experts, self.num_experts, owners))
        counts = order.counts.view(self.ep_size, -1).repeat_interleave(self.etp_size, 0)
        sent_facts = (
            counts if owners is None else torch.cat([counts, counts.new_tensor([owners.draws] * len(counts))], dim=1)
        )
        facts = torch.empty_like(sent_facts)
        dist.all_to_all_single(facts, sent_facts, group=self.group)
        arriving = facts[:, : counts.shape[1]]
        if counts.is_meta:
            # No counts: as if every expert were chosen as often, on every rank.
            shares = spread_evenly(routing.experts.numel(), self.ep_size)
            sent = received = [share for share in shares for _ in range(self.etp_size)]
        else:
            # The one place where the host waits for the device: it has to know how many rows to expect.
            sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()

        choices, places = order.choices, order.places
        # Each part of an expert needs all of its tokens, so every block of copies is sent once to each of its ranks.
        if self.etp_size > 1:
            blocks = choices.split(sent[:: self.etp_size])
            choices = torch.cat([block for block in blocks for _ in range(self.etp_size)])
            places = choices.argsort(stable=True).view(len(places), places.shape[1] * self.etp_size)
        tokens = choices // routing.experts.shape[1]
        rows = all_to_all_rows(copy_rows(x, tokens, places), sent, received, self.group)
        weights = copy_rows(routing.weights.reshape(-1, 1), choices, places.view(-1, self.etp_size))
        weights = all_to_all_rows(weights, sent, received, self.group)

        # Rows arrive by sending rank; sorted by expert, each expert's are neighbours and one product serves them.
        num_local = counts.shape[1]
        experts = torch.arange(num_local, device=x.device).repeat(len(received))
        experts = experts.repeat_interleave(arriving.flatten(), output_size=sum(received))
        local = sort_by_expert(experts[:, None], num_local)

        def combine(results: Tensor) -> Tensor:
            results = sum_rows(results, local.tokens, local.places)
            return sum_rows(all_to_all_rows(results, received, sent, self.group), tokens, places)

        return ExpertTokens(
            rows=copy_rows(rows, local.tokens, local.places),
            weights=copy_rows(weights, local.tokens, local.places).squeeze(1),
            counts=local.counts if owners is None else local.counts.view(-1, owners.kinds).sum(1),
            combine=combine,
            adapters=() if owners is None else owners.runs(arriving.tolist(), facts[:, counts.shape[1] :].tolist()),
        )
