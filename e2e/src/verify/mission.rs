//! Names the checks of the area `mission/`: one for each system that programs use.

use super::named::{NamedCheck, TestSelection};

/// The runtime's examples, a module for each system, over the simulated driver.
const EXAMPLES: &[&str] = &["--test", "mission"];

/// The shim's tests of managed memory.
const MANAGED: &[&str] = &["--test", "managed"];

/// The audit's tests with an agent and programs.
const AUDIT: &[&str] = &["--test", "audit"];

/// Unit tests of the libraries.
const LIB: &[&str] = &["--lib"];

/// The checks of the area.
pub(super) const CHECKS: &[NamedCheck] = &[
    NamedCheck {
        name: "mission/device-state",
        promise: "memory has a generation that only grows; a thread and a task are told when it becomes stale, also by the agent's fence",
        long: false,
        tests: &[
            TestSelection {
                target: EXAMPLES,
                names: &["state::subscribers_are_told_and_generations_grow"],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "state::subscription::tests::agent_fence_wakes_a_subscriber_without_a_check",
                    "state::subscription::tests::dropped_subscription_leaves_no_waker",
                    "state::subscription::tests::subscriber_of_a_stale_state_gets_the_reason_at_once",
                    "state::subscription::tests::task_is_woken_by_each_stage_and_ends_with_the_last",
                    "state::subscription::tests::thread_is_woken_by_a_change",
                    "state::tests::generations_grow_with_each_state_and_process_image",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "mission/generations",
        promise: "GpuNode and Events tell each bump of a GPU's generation with both numbers, each container's process generation, restarts and last fault",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "actor::handle::tests::lost_memory_is_told_with_both_generations",
                "faults::events::tests::message_of_a_restart_has_time_and_generations",
                "generations::tests::each_bump_is_told_once_with_both_numbers",
                "publish::tests::tenants_changes_alone_are_written_once_an_interval",
                "recovery::tests::last_fault_outlives_the_end_of_its_image",
                "recovery::tests::restarts_in_place_are_counted_if_the_image_followed",
                "node_report::containers::tests::container_has_generation_restarts_and_last_fault",
                "render::tests::containers_and_leases_of_the_status_are_bounded",
                "render::tests::only_what_tenants_change_at_will_may_wait",
                "summary::tests::generations_are_one_number_unless_they_differ",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/retained-leases",
        promise: "retained leases are listed by namespace with size, generation, state and owner, and a namespace with many displaces only its own",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "status::tests::lease_is_listed_with_size_generations_state_and_owner",
                "status::tests::namespace_with_many_leases_displaces_only_its_own",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/runtime-supervision",
        promise: "the agent runs an allocator runtime for each healthy GPU; a GPU that CUDA refuses takes no pods until a start succeeds; drains, losses, hangs and kills end or restart it",
        long: false,
        tests: &[
            TestSelection {
                target: &["--test", "leases"],
                names: &[
                    "supervised::agent_without_retained_memory_starts_no_runtime",
                    "supervised::drain_ends_a_runtime_that_is_starting",
                    "supervised::eight_gpus_get_runtimes_two_at_a_time_and_pods_meanwhile",
                    "supervised::gpu_that_cuda_refuses_takes_no_pods_until_a_start_succeeds",
                    "supervised::mig_instance_gets_a_runtime_with_its_first_lease",
                    "supervised::runtime_ends_with_a_lost_gpu_and_starts_when_it_is_back",
                    "supervised::runtime_killed_amid_a_create_lends_nothing_and_restarts",
                    "supervised::start_that_hangs_is_killed_and_tried_again",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "node_report::tests::each_gpu_has_a_runtime_unless_retained_memory_is_off",
                    "render::tests::runtime_is_written_at_once_for_its_state_alone",
                    "runtimes::tests::backoff_doubles_and_is_reset_by_a_steady_run",
                    "runtimes::tests::codes_of_refusals_have_a_remedy",
                    "runtimes::tests::ended_runtime_keeps_its_counts_alone",
                    "runtimes::tests::gpu_is_unfit_after_three_refusals_over_thirty_seconds",
                    "runtimes::tests::only_refusals_make_a_gpu_unfit",
                    "runtimes::tests::stuck_runtime_is_reported_before_a_drain",
                    "runtimes::tests::successful_start_makes_a_refused_gpu_fit",
                    "supervision::tests::drained_gpu_gets_no_runtime_until_the_drain_ends",
                    "supervision::tests::failed_start_waits_for_its_back_off_and_for_others",
                    "supervision::tests::lost_gpu_and_one_that_waits_for_a_reset_have_none",
                    "supervision::tests::mig_runtime_lasts_from_first_lease_until_after_the_last",
                    "supervision::tests::nothing_changes_while_nvml_does_not_answer",
                    "supervision::tests::nothing_starts_before_the_first_offer",
                    "supervision::tests::runtime_ends_with_a_gpu_that_is_not_listed_any_more",
                    "supervision::tests::stuck_runtime_is_not_started_again",
                    "supervision::tests::two_runtimes_start_at_a_time",
                    "supervision::tests::unhealthy_gpu_keeps_its_runtime_and_gets_none",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "mission/memory-token",
        promise: "tokens are signed with a node key whose public half anybody verifies them with; a changed token, another key and a replaced key are told apart",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "memory::gpu_token::tests::changed_token_and_other_key_are_told_apart",
                "memory::gpu_token::tests::token_is_verified_anywhere_by_the_public_key",
                "messages::signed_token::tests::public_key_is_written_as_hex",
                "messages::signed_token::tests::token_parses_to_what_was_signed",
                "render::tests::public_key_of_tokens_is_in_the_status",
                "tokens::key::tests::key_is_created_once_with_mode_0600",
                "tokens::key::tests::malformed_or_readable_key_is_replaced",
                "tokens::seal::tests::no_changed_bit_is_unsealed",
                "tokens::seal::tests::seal_is_an_ed25519_signature",
                "tokens::tests::new_key_refuses_earlier_tokens",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/gpu-ref",
        promise: "a shared reference tells its generation and GPU, and foreign work that is recorded afterwards orders later uses and the free",
        long: false,
        tests: &[TestSelection {
            target: EXAMPLES,
            names: &[
                "references::reference_tells_its_generation_and_records_foreign_work",
                "references::recorded_write_counts_even_if_the_token_is_refused",
                "references::later_write_follows_a_recorded_read_and_its_predecessors",
                "references::free_waits_for_recorded_work",
                "references::recorded_use_is_refused_when_untracked_or_stale",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/managed-ref",
        promise: "managed memory has several owners, one writer at a time by token and lock, and an allocator with statistics",
        long: false,
        tests: &[TestSelection {
            target: EXAMPLES,
            names: &[
                "managed::managed_memory_is_shared_and_counted",
                "managed::second_writer_gets_neither_token_nor_lock",
                "managed::writer_waits_for_the_readers_locks",
                "managed::memory_is_freed_with_the_last_clone_after_its_work",
                "managed::shared_managed_memory_is_inert_after_a_shutdown",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/managed-covered",
        promise: "managed memory, also that of variables, runs within the quota of each of the pod's GPUs, or within a quota of its own",
        long: false,
        tests: &[
            TestSelection {
                target: MANAGED,
                names: &[
                    "covered_memory_needs_room_on_every_gpu",
                    "gpus_quota_covers_managed_memory_without_a_quota",
                    "managed_memory_has_a_quota_of_its_own",
                    "managed_variable_is_charged_until_its_module_is_unloaded",
                    "programs_are_told_that_host_memory_stays_on_the_host",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "accounts::tests::covered_memory_needs_room_on_every_gpu",
                    "accounts::tests::covered_memory_never_exceeds_a_quota",
                    "container::tests::managed::exited_process_frees_its_covered_memory",
                    "container::tests::managed::freed_managed_memory_is_given_to_the_gpus_account",
                    "container::tests::managed::lower_quota_of_the_gpu_lowers_that_of_covered_memory",
                    "container::tests::managed::managed_memory_outlives_no_process_whatever_its_page_says",
                    "container::tests::managed::managed_quota_of_the_pod_ends_the_cover",
                    "container::tests::managed::programs_see_covered_memory_as_used",
                    "container::tests::managed::quota_of_the_gpu_covers_managed_memory",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "mission/managed-audit",
        promise: "resident managed memory refuses no neighbour, is no finding on honest pods and never counts as free; a pod that has more than its charge is named",
        long: false,
        tests: &[
            TestSelection {
                target: AUDIT,
                names: &[
                    "managed::pod_with_more_managed_memory_than_charged_is_named",
                    "managed::resident_managed_memory_refuses_no_neighbour",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "attestation::maps::tests::managed_bytes_are_those_of_mappings_of_the_uvm_node",
                    "audit::compare::tests::managed::charge_without_a_mapping_explains_nothing",
                    "audit::compare::tests::managed::chunks_that_the_driver_keeps_are_no_finding",
                    "audit::compare::tests::managed::container_with_more_mapped_than_charged_is_named",
                    "audit::compare::tests::managed::evictable_memory_is_what_is_in_use_and_charged",
                    "audit::compare::tests::managed::honest_managed_memory_is_no_finding",
                    "audit::compare::tests::managed::residency_is_a_finding_only_beyond_the_charges",
                    "container::tests::managed::processes_are_told_what_can_be_evicted_before_and_after_hello",
                    "managed::tests::device_memory_displaces_managed_memory",
                    "managed::tests::free_chunks_stay_in_use_until_the_last_context_ends",
                    "managed::tests::managed_memory_never_counts_as_free_or_refuses",
                    "managed::tests::neighbour_is_never_refused_beside_managed_memory",
                    "managed::tests::oldest_owner_loses_its_memory_first",
                    "managed::tests::pinned_managed_memory_refuses_a_neighbour",
                    "orphan_bound::tests::bound_never_falls_below_orphaned_bytes_and_reaches_zero",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: MANAGED,
                names: &["managed_memory_on_a_gpu_is_in_use_and_charged_to_no_process"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "mission/managed-audit-long",
        promise: "a neighbour of 64 GiB of managed memory allocates its whole quota 1,000 times, without a refusal and without a finding",
        long: true,
        tests: &[TestSelection {
            target: AUDIT,
            names: &["managed::resident_managed_memory_refuses_no_neighbour"],
            ignored: false,
            env: &[("BURSAR_LONG", "1")],
        }],
    },
    NamedCheck {
        name: "mission/managed-offer",
        promise: "a node offers managed memory beside quotas only where the driver can always evict it and the pod pays for its host memory; conditions have the reason",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "node_report::tests::host_memory_on_gpus_is_a_condition",
                "node_report::tests::managed_memory_is_offered_only_where_eviction_is_safe",
                "uvm::tests::ats_counts_only_where_the_platform_has_it",
                "uvm::tests::eviction_is_unsafe_when_pinned_or_uncharged",
                "uvm::tests::hmm_is_known_by_the_modules_parameter",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/managed-proof",
        promise: "memory is proven free beside managed memory by a balloon: held memory never is, no tenant is refused or killed, and nothing is left behind",
        long: false,
        tests: &[
            TestSelection {
                target: AUDIT,
                names: &[
                    "proof::managed_memory_stays_while_its_owner_lacks_host_memory",
                    "proof::memory_is_proven_free_beside_managed_memory_once_released",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "audit::compare::tests::managed::balloon_of_the_agent_is_no_finding",
                    "audit::eviction::tests::managed_memory_is_evicted_only_with_host_memory_for_all",
                    "audit::eviction::tests::managed_memory_of_all_gpus_needs_host_memory",
                    "audit::eviction::tests::no_managed_memory_is_evicted_beside_an_unknown_process",
                    "audit::eviction::tests::no_managed_memory_is_evicted_by_an_old_attestation",
                    "balloon::tests::balloon_leaves_grants_leases_and_listed_memory",
                    "balloon::tests::balloon_never_takes_what_was_granted",
                    "balloon::tests::balloons_are_rarer_until_other_memory_is_unproven",
                    "balloon::tests::tenants_cause_at_most_a_balloon_each_half_minute",
                    "grants::tests::pause_gives_up_when_a_grant_does_not_end",
                    "grants::tests::pause_holds_only_later_grants_of_its_gpu",
                    "host_memory::tests::cached_files_count_as_room_unless_they_are_dirty",
                    "host_memory::tests::container_has_the_least_room_up_to_its_pod",
                    "host_memory::tests::container_has_the_room_of_all_cgroups_above_its_pod",
                    "host_memory::tests::node_has_the_available_memory",
                    "node_report::tests::event_of_leaked_memory_says_why_nothing_is_proven",
                    "orphan_bound::tests::bound_never_falls_below_orphaned_bytes_and_reaches_zero",
                    "provisioners::balloon::tests::balloon_counts_only_when_held_until_its_input_closes",
                    "provisioners::balloon::tests::balloon_ends_at_its_deadline_when_it_does_not_answer",
                    "provisioners::balloon::tests::balloon_waits_for_the_last_process_and_for_a_drain",
                    "provisioners::balloon::tests::gpu_is_unfit_while_the_process_of_a_balloon_hangs",
                    "tests::balloon::balloon_ends_with_the_pause_when_samples_hang",
                    "tests::balloon::credit_and_hello_wait_for_a_balloon_and_are_answered",
                    "tests::balloon::grants_go_on_when_a_balloon_hangs_or_panics",
                    "tests::balloon::no_balloon_begins_late_in_the_pause_of_grants",
                    "tests::balloon::node_has_one_balloon_and_then_waits_for_an_audit",
                    "tests::balloon::nothing_is_evicted_before_the_audit_allows_it",
                    "tests::balloon::only_held_memory_stays_unproven_beside_a_balloon",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "provisioner"],
                names: &[
                    "balloon_ends_when_it_is_killed_or_forgotten",
                    "balloon_takes_all_but_held_memory_and_leaves_nothing",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "mission/peer-copy",
        promise: "copies of shared memory between GPUs follow the last writes, and later writes and frees follow the copies",
        long: false,
        tests: &[TestSelection {
            target: EXAMPLES,
            names: &[
                "peer_copy::peer_copy_follows_the_last_writes",
                "peer_copy::later_writes_and_the_free_follow_the_copy",
                "peer_copy::peer_copy_is_refused_with_its_reason",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/block-use",
        promise: "uses of blocks are ordered by their access over every resource that tracks them; a first use in another stream is joined",
        long: false,
        tests: &[TestSelection {
            target: EXAMPLES,
            names: &[
                "block_uses::block_uses_are_ordered_by_their_access",
                "block_uses::first_use_in_another_stream_is_joined",
                "block_uses::own_stream_follows_conflicting_uses_of_other_streams",
                "block_uses::uses_conflict_unless_both_read",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/pointer-collision",
        promise: "an address that the driver returns while a live block has it is an error, and the block stays its owner's",
        long: false,
        tests: &[TestSelection {
            target: EXAMPLES,
            names: &["block_uses::colliding_pointer_is_an_error_until_the_block_is_freed"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/device-runtime",
        promise: "a runtime owns its streams, its log, and a budget that follows the quota up and down while programs allocate",
        long: false,
        tests: &[TestSelection {
            target: EXAMPLES,
            names: &[
                "stack::lowered_quota_is_followed_without_a_call",
                "stack::raised_quota_counts_at_the_next_allocation",
                "stack::runtime_owns_its_streams_budget_and_log",
                "stack::stale_stack_refuses_allocations_and_logs_them",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "mission/physical-memory",
        promise: "a runtime without a context creates and exports memory by the budgets of the others, without a context call; the provisioner is one",
        long: false,
        tests: &[
            TestSelection {
                target: EXAMPLES,
                names: &[
                    "physical::physical_memory_is_mapped_by_its_importer",
                    "physical::runtime_without_a_context_creates_nothing_once_stale",
                    "physical::runtime_without_a_context_makes_no_context_call",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "resources"],
                names: &["physical::budgets_of_both_interfaces_agree_on_every_history"],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "provisioner"],
                names: &["provisioner_makes_no_context_call"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "mission/async",
        promise: "tasks allocate, copy, wait and free without blocking a worker of Tokio; errors and panics come back to the task",
        long: false,
        tests: &[
            TestSelection {
                target: EXAMPLES,
                names: &[
                    "tasks::dropped_future_leaks_no_memory",
                    "tasks::errors_and_panics_come_back_to_the_task",
                    "tasks::operations_leave_the_worker_to_other_tasks",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "sync::blocking::tests::more_work_than_threads_is_all_done",
                    "sync::blocking::tests::panic_of_work_is_an_error",
                    "sync::blocking::tests::work_beside_blocked_work_goes_on",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "mission/cudarc",
        promise: "contexts, streams and slices of cudarc go in and out of the runtime, without addresses, and are freed once",
        long: false,
        tests: &[TestSelection {
            target: EXAMPLES,
            names: &[
                "cudarc_interop::adopted_slice_is_freed_once_or_returned",
                "cudarc_interop::cudarc_program_adopts_memory_without_addresses",
                "cudarc_interop::foreign_contexts_and_stale_runtimes_are_refused",
                "cudarc_interop::streams_of_cudarc_keep_their_identity",
            ],
            ignored: false,
            env: &[],
        }],
    },
];
