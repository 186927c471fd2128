"""Training groups and engines on a cluster: what they reserve, how ranks meet, start and end, what operations hand on."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "auto-device-asks-the-wrong-cores",
        "actors.rollout.placement:resolve_device",
        "has_gpu and config.cores is None",
        "has_gpu and config.cores_per_engine is None",
        ("test_engines_take_the_gpus_that_there_are_unless_they_are_bound_to_cores",),
        "engines with cores of their own would sample on the CPU beside idle GPUs",
    ),
    Fault(
        "fraction-of-a-gpu-reserves-a-whole",
        "actors.cluster.placement:_bundle",
        'return {"CPU": cores, **({"GPU": gpus} if gpus else {})}',
        'return {"CPU": cores, **({"GPU": 1} if gpus else {})}',
        ("test_each_rank_reserves_the_cores_and_the_share_of_a_gpu_that_are_asked_for",),
        "the engine that shares the GPU would wait for it until the start fails",
    ),
    Fault(
        "one-refusal-closes-the-doorway",
        "actors.cluster.tcp_proxy:TcpProxy._lead",
        "inside.close()",
        "self.close()",
        ("test_a_connection_that_the_gate_refuses_is_closed_and_later_ones_pass",),
        "one connection that fails would cut a rank off from its group's store",
    ),
    Fault(
        "lost-cluster-elsewhere-ends-own-children",
        "actors.cluster.ray_watch:_Watch._end",
        "descendants() if self._ours else set()",
        "descendants()",
        ("test_children_are_ended_with_a_ray_that_was_started_here_and_with_no_other",),
        "processes that have nothing to do with Ray would be killed",
    ),
    Fault(
        "ranks-compute-with-one-thread",
        "actors.train.worker:TrainWorker.__init__",
        "self._threads = threads",
        "self._threads = 1",
        ("test_a_rank_computes_with_its_cores_and_knows_its_place",),
        "the other cores of a rank would idle",
    ),
    Fault(
        "rebuilt-models-are-named-anew",
        "actors.train.group:TrainGroup._submit.finish",
        '{**arguments, "name": made.name}',
        "arguments",
        ("test_tenants_of_a_lost_group_are_made_again_on_the_new_base",),
        "a model could get the name of another one",
    ),
    Fault(
        "shutdown-by-another-driver-ends-the-group",
        "actors.train.group:TrainGroup.shutdown",
        """
        closing = self._on_ranks("shutdown", RankFunction(RankContext.close), list)
        try:
            closing.result(timeout)
        except TimeoutError:
            return
        finally:
            self._ranks.end()
        """,
        """
        try:
            self._on_ranks("shutdown", RankFunction(RankContext.close), list).result(timeout)
        except TimeoutError:
            return
        finally:
            self._ranks.end()
        """,
        ("test_a_driver_whose_group_another_operates_ends_nothing",),
        "a driver would stop ranks that another one trains with",
    ),
    Fault(
        "forward-takes-the-largest-micro-batches",
        "actors.train.group:TrainGroup.forward",
        """
        return self.forward_backward.submit(
            handle,
            sequences,
            None,
            forward_only=True,
            meta=meta,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            router_replay=router_replay,
        )
        """,
        """
        return self.forward_backward.submit(
            handle,
            sequences,
            None,
            forward_only=True,
            meta=meta,
            router_replay=router_replay,
        )
        """,
        ("test_a_pass_is_cut_by_the_tokens_that_it_asks_for",),
        "a forward pass would take the memory of larger micro-batches than asked for",
    ),
    Fault(
        "share-of-a-gpu-over-what-is-given",
        "actors.rollout.placement:with_share",
        'if gpus and not config.is_set("gpus_per_worker"):',
        "if gpus:",
        ("test_engines_take_their_share_of_the_cluster_where_they_do_not_say_otherwise",),
        "engines would take another share of a GPU than they were given",
    ),
    Fault(
        "hiccups-add-up-to-a-loss",
        "actors.cluster.ray_watch:_Port.__call__",
        "self._failing_since = None",
        "pass",
        ("test_a_server_elsewhere_is_lost_when_it_has_not_answered_for_long",),
        "two short hiccups of the network would end a run",
    ),
    Fault(
        "loss-of-ray-told-as-what-follows-from-it",
        "actors.cluster.ray_watch:watch_cluster",
        "not isinstance(error, ClusterLostError) and watch.found()",
        "watch.pending()",
        ("test_an_error_that_follows_from_the_loss_of_ray_is_told_as_the_loss",),
        "a run would name a rank that died in place of Ray, and end with another status",
    ),
    Fault(
        "rank-environment-share-of-gpu",
        "actors.train.ranks:_rank_environment",
        '"0" if gpus else str(placed.slots[rank].index_on_node)',
        '"0" if gpus >= 1 else str(placed.slots[rank].index_on_node)',
        ("test_a_rank_with_a_share_of_a_gpu_sees_one_alone",),
        "a rank that shares a GPU would look for one that it does not see",
    ),
]
