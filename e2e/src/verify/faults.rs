//! Names the checks of the area `faults/`, each with its tests.

use super::named::{NamedCheck, TestSelection};

/// Unit tests of the libraries.
const LIB: &[&str] = &["--lib"];
/// Tests of the watch that agent and operator share.
const WATCH: &[&str] = &["--test", "watch"];
/// Tests of objects that another version wrote.
const VERSIONS: &[&str] = &["--test", "versions"];

/// Tests of the whole operator with a fake API server.
const OPERATOR: &[&str] = &["--test", "operator"];

/// Tests with one node that reports false facts.
const FAKE_API_SERVER: &[&str] = &[
    "placement::plan::tests::untrusted_reports::no_step_names_a_pod_of_another_node_for_any_report",
    "placement::plan::tests::untrusted_reports::honest_node_report_names_its_pods",
];

/// Tests of the whole agent as a process, with a simulated driver.
const AGENT: &[&str] = &["--test", "agent"];

/// The checks of the area that run without a cluster.
pub(super) const CHECKS: &[NamedCheck] = &[
    NamedCheck {
        name: "faults/api-restored",
        promise: "agents and watches list their objects again after a restore of etcd, and the agent writes its status again (on a real etcd: operator/api/server)",
        long: false,
        tests: &[
            TestSelection {
                target: WATCH,
                names: &[
                    "watch_lists_anew_when_etcd_was_restored",
                    "watch_lists_anew_every_half_hour_at_least",
                    "watch_resumes_where_it_was_after_each_end",
                    "watch_goes_on_after_its_connection_died_in_silence",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "tests::spec_and_status_follow_a_restored_etcd",
                    "history::tests::write_below_the_newest_revision_asks_for_a_list",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/api-backoff",
        promise: "5,000 clients of an unreachable API server back off, whether their lists fail or their watches end at once",
        long: false,
        tests: &[TestSelection {
            target: WATCH,
            names: &[
                "clients_back_off_while_their_lists_fail",
                "clients_back_off_while_their_watches_end_at_once",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/api-versions",
        promise: "a value or an entry of another API version has no effect on other objects and entries",
        long: false,
        tests: &[
            TestSelection {
                target: VERSIONS,
                names: &[
                    "budget_is_read_when_an_enum_has_a_later_value",
                    "gpu_node_is_read_when_an_enum_has_a_later_value",
                    "schema_refuses_the_value_that_stands_for_unknown_ones",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "tests::spec_of_another_version_stops_nothing_else",
                    "spec::tests::malformed_entry_is_named_and_the_rest_is_read",
                    "node_report::tests::unknown_spec_entries_are_a_condition_only",
                    "metrics::tests::unrecognized_spec_entries_are_counted_while_they_last",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/api-deleted",
        promise: "the agent creates a deleted GpuNode again within seconds, owned by the current Node, and a drain stays in force",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "tests::deleted_object_is_created_again_within_seconds",
                "tests::object_is_owned_by_the_current_node",
                "tests::drain_outlives_the_object_whose_spec_named_it",
                "tests::drain_on_record_outlives_object_and_agent",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/api-agent",
        promise: "an agent's status and orders arrive although single writes fail and watches are late, repeat or stop",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "tests::status_and_spec_arrive_through_every_watch_fault",
                "tests::status_arrives_through_every_write_fault",
                "tests::lost_answer_counts_as_outage_from_its_request",
                "api_client::tests::watch_continues_without_events",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/clock-agent",
        promise: "windows and deadlines of faults, and process generations, do not depend on the wall clock",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "recovery::tests::deadlines_hold_when_the_wall_clock_goes_back",
                "recovery::tests::checkpoint_with_wall_clock_times_is_read",
                "container::tests::poisoned::generation_is_unique_when_the_checkpoint_is_lost",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/clocks",
        promise: "clocks of API server, operator and node that differ by an hour change no eviction and no time of an eviction",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "budget::plan_tests::new_or_lowered_budget_evicts_no_running_pod",
                    "budget::plan_tests::plan_converges_after_a_crash_at_any_step",
                    "budget::plan_tests::lowered_budget_evicts_nobody_after_a_crash",
                    "budget::plan_tests::enforced_since_is_the_later_quotas_time_or_absent",
                    "budget::plan_tests::fault_eviction_happens_once_after_a_crash_at_any_step",
                    "budget::quotas::tests::quota_sync_time_is_its_last_status_write",
                    "placement::plan::tests::relocation::relocation_record_counts_whatever_its_timestamp",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: OPERATOR,
                names: &[
                    "clocks::lost_gpu_has_the_same_grace_by_any_nodes_clock",
                    "clocks::pod_from_before_its_budget_stays_by_any_operators_clock",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/etcd-restored",
        promise: "the operator follows the cluster within 30 s of a restore of etcd to older versions (on a real etcd: operator/api/server)",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "cluster::own_writes::tests::response_counts_after_a_list_of_lower_versions",
                    "budget::state::tests::written_status_is_forgotten_after_a_new_list",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: OPERATOR,
                names: &["restored::operator_follows_again_after_a_restore_of_etcd"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/other-versions",
        promise: "an object that cannot be parsed, or has a value of another version, affects no other object, causes no eviction, and is named by a condition and a metric",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "cluster::index::tests::unreadable_objects_are_named_and_no_budget_counts_as_gone",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: OPERATOR,
                names: &[
                    "versions::later_action_evicts_nobody",
                    "versions::later_value_in_a_budget_is_named_and_stops_nothing",
                    "versions::later_value_in_a_node_is_named_and_stops_nothing",
                    "versions::unreadable_objects_stop_nothing_but_themselves",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/dead-node",
        promise: "a node that is not Ready or has no agent counts in no cohort after a minute, as the condition Covered reports, and counts again when it recovers",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "budget::tests::excluded_nodes_are_named_by_reason",
                    "cluster::node_liveness::tests::node_is_dead_after_its_grace_and_alive_at_once",
                    "cluster::node_liveness::tests::node_that_recovers_in_time_is_never_dead",
                    "cluster::index::tests::dead_node_leaves_its_cohort_and_returns_when_it_lives",
                    "cluster::index::tests::gpus_without_a_node_count_until_the_grace_ends",
                    "cluster::index::tests::node_is_alive_when_ready_and_its_kubelet_offers_memory",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: OPERATOR,
                names: &["nodes::node_without_an_agent_leaves_its_cohort_and_comes_back"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/lying-worlds",
        promise: "whatever a node reports, no step of the operator names a pod of another node, in 2,000 random clusters",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: FAKE_API_SERVER,
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/lying-worlds-long",
        promise: "whatever a node reports, no step of the operator names a pod of another node, in 100,000 random clusters",
        long: true,
        tests: &[TestSelection {
            target: LIB,
            names: FAKE_API_SERVER,
            ignored: false,
            env: &[("BURSAR_LONG", "1")],
        }],
    },
    NamedCheck {
        name: "faults/nvml-one-gpu",
        promise: "while NVML hangs for one GPU, the agent neither offers nor binds it, and serves the other GPUs as before",
        long: false,
        tests: &[
            TestSelection {
                target: AGENT,
                names: &[
                    "hangs::agent_serves_other_gpus_while_nvml_hangs_for_one",
                    "hangs::agent_finds_its_other_gpus_when_one_hangs_at_its_start",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &["health::tests::gpu_is_unhealthy_at_once_when_a_call_hangs"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/nvml-all-gpus",
        promise: "while NVML hangs for all GPUs, the agent offers none, bindings stay, and the agent can end and start",
        long: false,
        tests: &[TestSelection {
            target: AGENT,
            names: &["hangs::agent_offers_nothing_and_ends_while_nvml_hangs_for_all"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/state-disk",
        promise: "while the disk of the state directory hangs, the agent admits, binds and offers, a condition and a metric report the delay, and an agent that starts registers",
        long: false,
        tests: &[
            TestSelection {
                target: AGENT,
                names: &[
                    "hangs::agent_offers_and_binds_while_the_state_disk_hangs",
                    "hangs::agent_registers_when_started_while_disks_hang",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "node_report::tests::late_state_write_is_a_condition_that_names_the_directory",
                    "checkpoint::write_behind::tests::file_returns_the_newest_value",
                    "checkpoint::write_behind::tests::file_blocks_no_caller_while_the_disk_hangs",
                    "checkpoint::write_behind::tests::file_that_cannot_be_read_is_tried_again",
                    "generations::tests::generations_go_on_within_a_boot_when_the_disk_hangs",
                    "installer::tests::installer_waits_once_for_an_installation_that_hangs",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/readiness",
        promise: "an agent that does its work is ready, on a node without a healthy GPU too, so that a cluster's upgrade continues",
        long: false,
        tests: &[
            TestSelection {
                target: AGENT,
                names: &["hangs::agent_is_ready_on_a_node_without_a_healthy_gpu"],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "publisher::tests::agent_is_not_ready_while_it_cannot_serve",
                    "publisher::tests::agent_is_ready_unregistered_on_a_node_without_gpu",
                    "publisher::tests::agent_is_ready_whatever_the_state_of_the_hardware",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/hangs",
        promise: "pods are admitted, bound or refused as specified while NVML, the state's disk or the API server hangs for 20 s",
        long: false,
        tests: &[TestSelection {
            target: AGENT,
            names: &["hangs::hangs_leave_the_rest_of_the_node_in_service"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/hangs-of-a-minute",
        promise: "hangs of 60 s have the results in the table of docs/reliability.md",
        long: true,
        tests: &[TestSelection {
            target: AGENT,
            names: &["hangs::hangs_of_a_minute_leave_the_rest_in_service"],
            ignored: true,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/bounded",
        promise: "state of the agent and the operator for GPUs, nodes and builds is bounded while these come and go, and no GPU gets a generation twice",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "provisioners::tests::provisioner_threads_end_with_their_gpus",
                "generations::tests::generations_are_bounded_and_unique_when_gpus_are_recut",
                "tests::gpu_tasks_end_when_no_container_has_the_gpu",
                "shim_install::tests::builds_are_removed_when_no_cdi_file_mounts_them",
                "cdi::tests::mounted_paths_are_unknown_when_a_cdi_file_is_unreadable",
                "container::denials::tests::log_line_is_due_once_for_all_containers",
                "context_size::tests::context_sizes_are_those_of_the_nodes_gpus",
                "scrub_check::tests::verdicts_are_those_of_the_nodes_gpus",
                "cluster::index::tests::orders_written_to_a_node_are_forgotten_when_it_is_gone",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/growth",
        promise: "an agent has as many descriptors, threads, tasks, processes and files after rounds of pods, MIG instances and builds as before",
        long: false,
        tests: &[TestSelection {
            target: AGENT,
            names: &["growth::agent_leaks_nothing_when_pods_and_instances_change"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/growth-long",
        promise: "an agent has as many descriptors, threads, tasks, processes and files after 20 builds and 6,000 rounds of pods as before",
        long: true,
        tests: &[TestSelection {
            target: AGENT,
            names: &["growth::agent_leaks_nothing_over_many_builds_and_rounds"],
            ignored: true,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/idle-at-250-pods",
        promise: "an idle agent makes at most 150 allocations a second for each of 250 pods, and no scrape misses a series",
        long: false,
        tests: &[
            TestSelection {
                target: &["--test", "idle"],
                names: &["idle_agent_allocates_little_for_each_of_250_pods"],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &["metrics::tests::page_is_complete_while_figures_are_replaced"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/on-record",
        promise: "every ordered restart has a record, and no record returns after the end of its allocation",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "container::tests::poisoned::no_restart_is_ordered_when_the_checkpoint_fails",
                "tests::checkpoint_stays_removed_when_a_process_exits_meanwhile",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/unread",
        promise: "leases and CDI files of another version that the agent cannot parse stay, and stay charged; a checkpoint of another version changes no binding",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "leases::tests::unreadable_lease_is_dropped_when_its_gpu_is_drained",
                    "leases::tests::unreadable_lease_stays_and_is_charged",
                    "allocator::tests::unreadable_cdi_file_stays_while_kubelet_lists_it",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: AGENT,
                names: &["restarts::lost_or_corrupt_checkpoint_is_rebuilt_with_same_bindings"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/override-of-each-gpu",
        promise: "a lowered quota applies to each GPU of a pod, also if an agent reports the pod with one of them only",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "placement::plan::tests::node_writes::override_covers_each_gpu_when_the_agent_lists_one_of_two",
            ],
            ignored: false,
            env: &[],
        }],
    },
];
