//! Names the checks of the area `security/`, each with the tests that show it.

use super::named::{NamedCheck, Tests};

/// The libraries' own tests.
const LIB: &[&str] = &["--lib"];

/// The search targets of frames and credit pages.
const FRAMES: &[&str] = &[
    "fdstore::fdstore_requests_round_trip",
    "fdstore::fdstore_responses_round_trip",
    "messages::frame_headers_are_bounded",
    "messages::memory_ids_round_trip",
    "messages::requests_round_trip",
    "messages::responses_round_trip",
    "page::pages_with_any_content_stay_bounded",
    "provisioner::provisioner_requests_round_trip",
    "provisioner::provisioner_responses_round_trip",
];

/// The search targets of texts and files.
const TEXTS: &[&str] = &[
    "files::cdi_files_are_bindings_of_their_names_or_malformed",
    "files::device_checkpoints_are_believed_in_whole_entries",
    "files::session_records_of_any_content_are_served",
    "kmsg::kernel_log_record_decides_by_its_beginning_alone",
    "proc::capabilities_are_of_the_field_alone",
    "proc::cgroup_owners_are_named_in_the_path",
    "proc::memory_map_lines_are_told_apart",
    "proc::mount_tables_end_every_walk",
    "proc::process_names_move_no_field_of_stat",
    "seal::changed_tokens_are_never_unsealed",
];

/// A test of the target `confined`, whose runner (libtest-mimic) takes a single name.
const fn confined(names: &'static [&'static str; 1]) -> Tests {
    Tests {
        target: &["--test", "confined"],
        names,
        ignored: false,
        env: &[],
    }
}

/// Every check of the area, but for the trials on a cluster and what `operator/api/server` shows.
pub(super) const CHECKS: &[NamedCheck] = &[
    NamedCheck {
        name: "security/confined",
        shows: "a process that loads the driver has no capability, runs no other program and has no network; the agent keeps nine capabilities and mounts nothing",
        long: false,
        tests: &[
            confined(&["driver_process_is_refused_what_it_never_needs"]),
            confined(&["agent_starts_programs_and_is_refused_mounts"]),
            confined(&["unconfined_process_is_refused_nothing_of_it"]),
        ],
    },
    NamedCheck {
        name: "security/exports-believed",
        shows: "an export is never believed to be less than was told before, at the death neither, and a page's number of accounts is the agent's own",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::container::tests::an_exporter_that_unsays_its_exports_keeps_them_charged",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/page-accounts",
        shows: "a process that writes another number of accounts into its credit page hides none of them from the agent",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "credit_page::tests::page_keeps_its_accounts_when_a_tenant_overwrites_the_count",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exports-neighbours",
        shows: "what living processes of other containers exported holds up no dead process's memory; what its own container's did, does",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::orphan_bound::tests::living_exports_hold_up_their_own_container_alone",
                "sessions::orphan_bound::tests::living_exports_explain_nothing_that_is_listed",
                "sessions::orphan_bound::tests::nothing_is_proven_free_that_is_held_and_all_is_once_nobody_holds_it",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exports-listed",
        shows: "what the driver lists for a container's processes is not known as unlisted as well, whatever they say that they exported; managed memory is",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::audit::compare::tests::an_export_that_is_listed_accounts_for_nothing_unlisted",
                "enforcement::audit::compare::tests::managed_memory_on_a_gpu_is_accounted_for",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/allowance-once",
        shows: "the process allowance is for a container once, with a tenth of its quota at most, and processes without room for their contexts are a finding",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::audit::compare::tests::a_quota_with_its_tolerance_and_one_allowance_may_be_used_and_one_byte_more_may_not",
                "enforcement::audit::compare::tests::processes_without_room_for_their_contexts_are_a_finding",
                "enforcement::audit::compare::tests::honest_containers_are_no_finding_and_whatever_is_listed_is_accounted_for",
                "enforcement::audit::compare::tests::memory_beyond_all_allowances_is_always_found_whoever_has_it",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/contextless",
        shows: "what the kernel module says that a pod's process owns without a context is charged to it, with a session or without, and an answer of another layout is not believed",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::audit::collect::tests::contextless_memory_is_charged_to_pods_processes_alone",
                "enforcement::audit::compare::tests::contextless_memory_beyond_the_quota_is_found_with_a_session",
                "enforcement::audit::compare::tests::listed_dead_that_no_ledger_knows_are_of_nobody",
                "gpu::holders::tests::answer_is_believed_only_when_it_lists_the_asker",
                "gpu::holders::tests::imported_memory_is_not_owned",
                "gpu::holders::tests::parameters_have_the_kernel_modules_sizes",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/holders-judged",
        shows: "a process that uses the driver without session and context is named while memory is of nobody, an honest one never; killed only where no other container has one; memory of nobody counts within a window",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::audit::compare::tests::a_process_with_the_driver_and_no_session_is_a_holder_while_memory_is_of_nobody",
                "enforcement::audit::compare::tests::honest_processes_are_no_holders_whatever_is_of_nobody",
                "enforcement::audit::compare::tests::a_child_with_a_driver_of_its_own_is_a_holder",
                "enforcement::audit::compare::tests::holders_of_several_containers_are_all_named_and_none_is_alone",
                "enforcement::audit::compare::tests::memory_of_nobody_is_of_the_only_container_that_uses_the_driver",
                "enforcement::audit::policy::tests::a_holder_is_told_at_the_second_audit_and_killed_only_where_it_is_alone",
                "enforcement::audit::consecutive::tests::memory_of_nobody_counts_within_a_window_and_once",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/holders-found",
        shows: "on a whole agent 7 GiB without a context, beside 7 GiB that are listed and said to be exported, in a quota of 8 are found within 2 s, and ended within seconds under kill; a program that only began with the driver, an exporter and its forked child in another pod are not accused",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &[
                "found::who_holds_memory_without_a_context_is_found",
                "found::who_holds_memory_without_a_context_is_killed_and_nobody_beside",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exports-unsaid",
        shows: "on a whole agent an exporter that writes 0 into its page, parks the descriptor and dies stays charged until it is let go",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &["left::what_an_exporter_unsays_before_its_death_stays_charged"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/together",
        shows: "containers of a pod all have their memory or none has: 4+4+12+12 and two pods of 7+9 start on two GPUs of 16, init containers and sidecars are not added up, what is held ends with the pod",
        long: false,
        tests: &[Tests {
            target: &["--test", "together"],
            names: &[
                "a_pod_of_4_4_12_12_starts_on_two_gpus_of_16",
                "two_pods_of_7_and_9_start_at_once_on_two_gpus_of_16",
                "a_pod_that_cannot_be_placed_whole_holds_nothing",
                "what_is_held_for_a_pod_outlives_the_agent_and_ends_with_the_pod",
                "what_is_held_is_given_up_when_the_kubelet_stays_away",
                "init_containers_and_what_follows_them_are_not_added_up",
                "what_is_spread_after_an_init_container_has_its_place_from_the_first",
                "a_gpu_that_fails_takes_what_was_held_and_the_rest_is_placed_anew",
                "a_container_that_starts_again_takes_nothing_from_those_to_come",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/together-kubelet",
        shows: "the same over the agent's plugin and a fake kubelet's checkpoint",
        long: false,
        tests: &[Tests {
            target: &["--test", "kubelet"],
            names: &["answers::a_pods_containers_all_start_where_together_they_fit"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/together-agent",
        shows: "the node's actor places a pod's containers together across its restarts",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "node::allocator::tests::a_pods_containers_are_placed_together_also_across_a_restart",
                "node::pod_resolver::tests::all_containers_of_the_pod_are_told_and_no_others",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/mig-not-spread",
        shows: "a claim larger than a MIG instance waits and says so; nothing is spread over instances",
        long: false,
        tests: &[Tests {
            target: &["--test", "together"],
            names: &["a_claim_on_mig_instances_waits_with_that_reason"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/mig-shares",
        shows: "the binder cuts nothing for MIG instances",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &["binder::tests::nothing_is_spread_over_mig_instances"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/one-account",
        shows: "containers of one claim share its quota: what the first exported, keeps or retains counts against the next, and both together never have more than it",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::container::tests::siblings::what_the_first_exported_counts_against_the_next",
                "sessions::container::tests::siblings::what_the_first_retains_counts_against_the_next_until_it_is_gone",
                "sessions::container::tests::siblings::what_another_claim_exported_is_inherited_within_the_quota",
                "sessions::container::tests::siblings::the_containers_of_a_claim_never_have_more_than_its_quota",
                "node::allocator::tests::what_an_init_container_exported_is_charged_to_the_next",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/withheld",
        shows: "what is in use and charged to nobody is bound to nobody, from ten looks on and until three after it is gone",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::audit::withheld::tests::what_stands_is_withheld_after_ten_looks_and_not_before",
                "enforcement::audit::withheld::tests::it_falls_soon_after_it_is_gone",
                "enforcement::audit::withheld::tests::a_peak_withholds_nothing",
                "enforcement::audit::withheld::tests::who_lets_go_for_one_look_in_nine_hides_nothing",
                "enforcement::audit::withheld::tests::noise_is_no_news",
                "enforcement::audit::withheld::tests::what_processes_of_others_have_is_charged_to_no_pod",
                "enforcement::audit::withheld::tests::a_gpu_that_does_not_answer_stays_as_it_was",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/withheld-ledger",
        shows: "the ledger binds nothing of it, takes nothing away, and says so to who waits",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "withheld::tests::what_is_charged_to_nobody_is_bound_to_nobody_and_takes_nothing_away",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/withheld-agent",
        shows: "the whole agent: memory past the shim that outlives its pod is promised to no neighbour until it is let go",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &["left::what_is_charged_to_nobody_is_promised_to_nobody"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/context-size",
        shows: "what a CUDA context is charged is what the agent measured with a process of its own, per boot, GPU and driver; no tenant's word changes it, and an older file is no obstacle",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::tests::a_context_costs_what_no_tenant_says",
                "sessions::context_size::tests::context_size_is_the_last_measurement_and_outlives_agents",
                "sessions::context_size::tests::context_size_is_none_that_no_context_takes",
                "sessions::context_size::tests::context_sizes_of_an_older_agent_or_half_a_file_are_none",
                "retained::scrub_check::tests::canary_goes_on_once_its_context_was_measured",
                "retained::scrub_check::tests::canary_that_prints_without_end_is_read_no_further",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/context-measured",
        shows: "a whole agent measures a context of each GPU once a boot, with nothing retained, and an older file keeps it from nothing",
        long: false,
        tests: &[Tests {
            target: &["--test", "leases"],
            names: &["measured::agent_measures_contexts_itself_and_once_a_boot"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/context-canary",
        shows: "the canary has a context and nothing else until it is told to go on",
        long: false,
        tests: &[Tests {
            target: &["--test", "worker"],
            names: &["the_canary_has_a_context_alone_until_it_is_told_to_go_on"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/vault-memory",
        shows: "a vault filled to its bound with the longest blobs stays within its memory limit",
        long: false,
        tests: &[Tests {
            target: &["--test", "vault"],
            names: &["the_fullest_vault_stays_within_its_memory"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/vault-share",
        shows: "a namespace that fills the vault leaves others their share; what is on its way out counts",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "retained::leases::tests::namespace_that_fills_the_vault_leaves_others_their_share",
                "retained::leases::tests::lease_of_an_older_agent_is_read_with_its_key",
                "retained::leases::tests::the_longest_blob_fits_into_the_vault",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/lease-names",
        shows: "names of leases are printable ASCII and of bounded length",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &["messages::retained::tests::lease_name_is_printable_and_bounded"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/desk-node-first",
        shows: "the node is heard before all questions of tenants",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &["retained::handle::tests::node_is_heard_before_all_questions_of_tenants"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/unscrubbed",
        shows: "a GPU whose driver was not seen to clear freed memory is its first namespace's for the boot, over restarts, ended pods and random histories; a pod of unknown namespace gets none",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sharing::tests::unscrubbed_gpu_is_its_first_namespaces_for_good",
                "sharing::tests::pod_of_unknown_namespace_has_no_unscrubbed_gpu",
                "sharing::tests::past_of_an_older_agent_or_a_lost_one_is_everybodys",
                "sharing::tests::no_unscrubbed_gpu_has_pods_of_two_namespaces_in_a_boot",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/unscrubbed-agent",
        shows: "a whole agent over a driver that does not clear keeps each GPU to one namespace and says why; over one that does, or with the admin's word, it shares",
        long: false,
        tests: &[Tests {
            target: &["--test", "leases"],
            names: &[
                "shared::unscrubbed_gpu_is_for_one_namespace_until_the_boot",
                "shared::scrubbed_gpu_and_one_that_the_admin_allows_are_shared",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/unscrubbed-told",
        shows: "the condition MemoryScrubbed says so and keeps no node from being ready",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "node::report::tests::why_no_memory_is_kept_is_told_and_keeps_no_node_from_being_ready",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/other-gpus",
        shows: "honest programs of root, whose libcuda makes the nodes of every GPU, are no finding on two GPUs; who may open another GPU is told, and who cannot be asked too; the same where a program of cgroup v2 decides",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &[
                "devices::honest_programs_of_root_on_two_gpus_are_never_accused",
                "devices::a_container_that_may_open_another_gpu_is_found",
                "devices::a_container_that_cannot_be_asked_is_told_as_not_attested",
                "devices::container_is_asked_when_a_program_of_v2_decides",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/other-gpus-asked",
        shows: "only a container that can have other GPUs is asked, a process that gives no answer ends in time, and no folder that is no cgroup is written to; with cgroups of v2 alone, and of both versions, those that decide are asked",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::attestation::device_access::tests::a_folder_that_is_no_cgroup_is_not_asked",
                "enforcement::attestation::device_access::tests::a_process_that_does_not_answer_is_ended_in_time",
                "enforcement::attestation::device_access::tests::what_can_neither_be_opened_nor_is_forbidden_is_no_answer",
                "enforcement::attestation::evaluate::tests::who_can_make_nodes_or_has_others_is_asked_what_it_may_open",
                "enforcement::attestation::evaluate::tests::what_may_be_opened_is_told_and_a_node_alone_is_not",
                "enforcement::attestation::device_access::tests::container_of_v2_alone_has_one_cgroup",
                "enforcement::attestation::device_access::tests::container_has_a_cgroup_of_devices_and_one_of_v2_beside_v1",
                "enforcement::attestation::device_access::tests::first_cgroup_inside_that_takes_processes_is_joined",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/large-processes",
        shows: "3 x 65,000 mappings with paths of 3,200 bytes and 3 x 100 GiB of environment: told as not attested, the agent's peak stays within 64 MiB of what it had, a neighbour's p99 below 100 ms",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &["large::mappings_and_environments_of_any_size_cost_bounded_memory"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/proc-bounds",
        shows: "nothing of a tenant's process is read without a bound of bytes and lines, and no other module reads files unlisted; a container whose processes cannot all be read within 60 s is told as not attested",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "procfs::tests::a_small_file_beyond_its_bound_is_too_large",
                "procfs::tests::lines_end_at_the_first_bound_that_they_pass",
                "procfs::tests::nothing_else_reads_files_without_being_listed_here",
                "enforcement::attestation::maps::tests::more_files_of_a_driver_than_any_program_has_are_too_many",
                "enforcement::attestation::evaluate::tests::a_path_in_a_lack_is_cut",
                "node::pod_cgroups::tests::a_containers_processes_are_found_in_the_cgroups_that_it_made_itself_too",
                "enforcement::attestation::probe::tests::container_is_not_attested_when_a_process_waits_for_60_s",
                "enforcement::attestation::probe::tests::process_that_waited_longest_is_read_first",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/event-storm",
        shows: "one pod's storm of Events leaves room for every other pod's, repeats are one Event with a count, and no Event of a finding names a pid of the host; the whole agent under waves of processes that are each a finding or a fault, with an API server that answers late and then never: as many Events as its bounds let pass, the neighbour's p99 below 100 ms, resident memory as before",
        long: false,
        tests: &[
            Tests {
                target: LIB,
                names: &[
                    "gpu_node::events::tests::a_pods_storm_leaves_room_for_every_other_pods_events",
                    "gpu_node::events::tests::the_same_thing_is_one_event_with_a_count_for_five_minutes",
                    "gpu_node::events::tests::saying_more_than_passes_drops_and_counts",
                    "gpu_node::events::tests::what_is_said_again_is_counted_in_its_event",
                    "enforcement::audit::events::tests::no_event_of_a_finding_names_a_pid",
                    "enforcement::faults::events::tests::a_fault_is_told_with_its_cause_its_image_and_what_is_done",
                ],
                ignored: false,
                env: &[],
            },
            Tests {
                target: &["--test", "security"],
                names: &["events::events_are_bounded_when_processes_come_in_waves"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "security/crash-loops",
        shows: "60 crash loops under the policy kill with audits that wait 0.4 s between NVML and the books: nobody is accused or killed",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &["honest::a_crash_looping_program_is_never_accused"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/crash-orders",
        shows: "20,000 random histories of processes that come, end, park memory and reuse pids, in every order with an audit's steps: no finding",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::audit::compare::tests::interleavings::no_order_of_honest_lives_and_an_audit_is_a_finding",
                "enforcement::audit::compare::tests::interleavings::a_death_between_the_list_and_the_books_is_no_finding",
                "enforcement::audit::compare::tests::who_gets_the_pid_of_a_dead_process_is_charged_for_what_that_left",
                "enforcement::audit::collect::tests::a_process_that_ended_and_is_not_reaped_is_gone",
                "enforcement::audit::collect::tests::this_process_is_alive_and_a_pid_that_nobody_has_is_not",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/time-slice",
        shows: "CAP_SYS_NICE over the host is told by a reason of its own, and the container is served",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &["devices::a_container_that_may_change_its_time_slice_is_told_and_served"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/crash-loops-1000",
        shows: "1,000 crash loops",
        long: true,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &["honest::a_program_that_crashes_a_thousand_times_is_never_accused"],
            ignored: true,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/honest-two-gpus",
        shows: "10 minutes of honest programs of root on two GPUs",
        long: true,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &["devices::honest_programs_on_two_gpus_are_not_accused_in_minutes"],
            ignored: true,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/passed-descriptors",
        shows: "what a process passes over its socket is refused by the kernel, and on older kernels closed beside the agent's threads: a neighbour's round trip p99 stays below 100 ms with two workers, with and without hello, out of band, refused, and when the sessions end",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::tests::passed::neighbour_is_served_when_kernel_refuses_descriptors",
                "sessions::tests::passed::neighbour_is_served_when_passed_sockets_linger",
                "sessions::tests::passed::neighbour_is_served_when_refused_sockets_linger",
                "sessions::tests::passed::neighbour_is_served_when_sessions_end_with_lingering_sockets",
                "sessions::tests::passed::container_is_not_accepted_while_its_sockets_linger",
                "sessions::tests::passed::accepted_socket_takes_no_descriptor_when_told_so",
                "sessions::tests::passed::listener_is_dropped_at_once_when_unaccepted_sockets_linger",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/lingering-agent",
        shows: "the whole agent with two workers under six lingering sockets: the neighbour's p99 below 100 ms, resident memory and descriptors as before",
        long: false,
        tests: &[Tests {
            target: &["--test", "security"],
            names: &[
                "socket::neighbour_is_answered_when_six_sockets_linger",
                "socket::neighbour_is_answered_when_six_sessions_linger",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/credit-pages",
        shows: "of 8,000 hellos on kept pages a container gets 1,024 at once and one a second; pages of the dead are handed out again, so honest churn never ends",
        long: false,
        tests: &[Tests {
            target: &["--test", "security"],
            names: &["socket::credit_pages_are_bounded_when_a_process_keeps_them"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/credit-pages-books",
        shows: "the budget of pages by itself",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::container::pages::tests::pages_are_few_when_processes_keep_them",
                "sessions::container::pages::tests::pages_never_end_when_processes_die",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/work-is-paid",
        shows: "messages pay for the processor that they take, requests share one write of the record and are answered only once it is there",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::rate_limit::tests::message_pays_for_the_processor_that_it_took",
                "sessions::rate_limit::tests::processor_time_is_of_work_and_not_of_sleep",
                "sessions::container::tests::recording::requests_share_a_write_when_writes_are_late",
                "sessions::container::tests::recording::record_is_written_20_times_a_second_at_most",
                "sessions::container::tests::recording::request_is_refused_when_the_record_is_not_written",
                "sessions::container::tests::recording::hello_waits_for_the_record_when_writes_are_late",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/crowd",
        shows: "512 processes that start at once are all granted, and a neighbour's p99 stays below 100 ms",
        long: false,
        tests: &[Tests {
            target: &["--test", "security"],
            names: &["socket::neighbour_is_answered_when_512_processes_start"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/one-look",
        shows: "one look at a GPU answers all containers that wait for what ended images had",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &["sessions::tests::driver_is_asked_once_for_all_containers_that_wait"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/outermost-pod",
        shows: "a container's own cgroup folders never pass for another pod's",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::peer::tests::other_pods_the_host_and_the_pods_own_folder_are_no_container_of_it",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/contended-word",
        shows: "the agent gives up a word that is written without pause, and the image gets nothing more",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &["atomic_credit::tests::agent_gives_up_when_a_word_is_written_without_pause"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/contended-image",
        shows: "an image whose page took no grant is fenced",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::container::tests::recording::image_gets_nothing_more_when_its_page_took_no_grant",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/xid-records",
        shows: "a name that a tenant chose, of a program or its file, decides nothing in a record of the kernel's log; nor does what a program wrote there, a record of another GPU, or one without NVML's event",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "enforcement::faults::kmsg::tests::a_name_that_a_tenant_chose_decides_nothing_in_a_record",
                "enforcement::faults::kmsg::tests::what_names_no_process_or_is_not_of_a_context_is_nobodys",
                "enforcement::faults::confirmation::tests::record_that_nvml_does_not_confirm_is_dropped",
                "enforcement::faults::confirmation::tests::belief_needs_an_event_of_that_gpu_and_code",
                "sessions::container::tests::poisoned::an_xid_says_which_of_the_containers_gpus_it_was",
                "sessions::container::tests::poisoned::xid_from_before_a_process_started_is_not_its_own",
                "sessions::container::tests::poisoned::xid_of_an_image_is_not_its_successors",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/xid-records-agent",
        shows: "the whole agent fences and kills nobody for forged records of the kernel's log, and acts on a real XID as before",
        long: false,
        tests: &[Tests {
            target: &["--test", "audit"],
            names: &[
                "poison::a_kernel_log_record_that_the_driver_did_not_write_fences_nobody",
                "poison::a_program_that_never_asks_the_driver_again_is_known_from_the_kernels_log",
                "poison::a_program_that_reports_its_fault_gets_its_error_and_its_container_is_killed",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fuzz-frames",
        shows: "whatever becomes of frames (shim, vault, worker, memory ids) is an error or the one message that encodes to it, and credit pages of any content stay bounded",
        long: false,
        tests: &[Tests {
            target: &["--test", "fuzz"],
            names: FRAMES,
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fuzz-text",
        shows: "whatever becomes of tokens, kernel log records, files of /proc, the kubelet's checkpoint, CDI files and session records: no panic, and each target's own property",
        long: false,
        tests: &[Tests {
            target: &["--test", "fuzz"],
            names: TEXTS,
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fuzz-frames-long",
        shows: "the same for 10 million frames of each kind",
        long: true,
        tests: &[Tests {
            target: &["--test", "fuzz"],
            names: FRAMES,
            ignored: false,
            env: &[("BOLERO_RANDOM_ITERATIONS", "10000000")],
        }],
    },
    NamedCheck {
        name: "security/fuzz-text-long",
        shows: "the same for a million texts of each kind",
        long: true,
        tests: &[Tests {
            target: &["--test", "fuzz"],
            names: TEXTS,
            ignored: false,
            env: &[("BOLERO_RANDOM_ITERATIONS", "1000000")],
        }],
    },
    NamedCheck {
        name: "security/adversary",
        shows: "a seeded hostile tenant does anything in any order to the whole agent for some seconds: no grant beyond the quota, no neighbour late, killed or refused, nothing left behind; each of its oracles complains of a world that breaks its promise",
        long: false,
        tests: &[Tests {
            target: &["--test", "security"],
            names: &[
                "adversary::adversary_harms_nobody_but_itself",
                "fixture::tests::complaint_is_none_when_agent_is_as_before",
                "fixture::tests::complaint_names_each_thing_that_a_load_may_not_do",
                "oracles::tests::charged_is_the_sum_of_a_record_up_to_the_quota",
                "oracles::tests::charged_complains_when_any_part_passes_the_quota",
                "oracles::tests::charged_complains_when_a_list_has_another_name",
                "oracles::tests::only_a_runtime_thread_asleep_in_a_close_is_seen",
                "oracles::tests::stuck_complains_of_a_thread_that_closes_at_four_looks",
                "oracles::tests::wronged_names_what_a_neighbour_lost",
                "oracles::tests::accused_names_a_finding_of_another_container",
                "oracles::tests::accused_complains_when_audits_or_findings_are_not_seen",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/adversary-million",
        shows: "the same for a million hostile steps",
        long: true,
        tests: &[Tests {
            target: &["--test", "security"],
            names: &["adversary::adversary_harms_nobody_but_itself"],
            ignored: false,
            env: &[("BURSAR_ADVERSARY_STEPS", "1000000")],
        }],
    },
    NamedCheck {
        name: "security/http",
        shows: "10,000 connections with unfinished headers: RSS within 64 MiB, all closed, a probe on its own listener answered within 100 ms at p99; idle connections leave probes their seats; metrics are encoded once for all who ask; oversized headers are refused; the whole agent under as many keeps its memory and descriptors, and answers its neighbour and its probes within 100 ms",
        long: false,
        tests: &[
            Tests {
                target: &["--test", "flood"],
                names: &[
                    "unfinished_headers_hold_little_and_are_closed",
                    "idle_connections_leave_probes_their_seats",
                    "metrics_are_encoded_once_for_all_who_ask",
                    "oversized_headers_are_refused",
                    "each_path_is_served_on_its_own_listener",
                ],
                ignored: false,
                env: &[],
            },
            Tests {
                target: &["--test", "security"],
                names: &["http::probes_are_answered_when_headers_never_end"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "security/nodes-word",
        shows: "whatever the GpuNode of one node says, the operator ends, moves or counts no pod that is not on that node",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "cluster::index::tests::node_report_affects_only_pods_on_that_node",
                "placement::plan::tests::node_reports::node_report_selects_no_victim_on_another_node",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/borrowers",
        shows: "a borrower gives back whatever its Job says, past its disruption budget after its grace",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "placement::plan::tests::preemption::borrower_is_preempted_whatever_its_job_says",
                "budget::plan_tests::borrower_over_limit_is_evicted_whatever_its_job_says",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/static-pods",
        shows: "an owner reference of kind Node makes no pod untouchable, and a mirror's annotation stands in for no other pod",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "placement::pod::tests::owner_is_read_from_the_controller_reference",
                "placement::plan::tests::node_reports::mirror_annotation_impersonates_no_other_pod",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/pods-name",
        shows: "a pod of the same name with another UID lends its namespace to nobody",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "node::pod_resolver::tests::a_pod_of_the_same_name_with_another_uid_gives_nothing",
            ],
            ignored: false,
            env: &[],
        }],
    },
];
