//! Names the checks of the area `security/`, each with its tests.

use super::named::{NamedCheck, TestSelection};

/// Unit tests of the libraries.
const LIB: &[&str] = &["--lib"];

/// Fuzz targets of frames and credit pages.
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

/// Fuzz targets of texts and files.
const TEXTS: &[&str] = &[
    "files::cdi_file_is_a_binding_of_its_name_or_malformed",
    "files::device_checkpoint_is_parsed_by_whole_entries",
    "files::generation_grows_after_a_file_of_any_content",
    "files::session_record_of_any_content_is_served",
    "kmsg::kernel_log_record_is_classified_by_its_start",
    "ledger_of_any_checkpoint_is_refused_or_serves_pods",
    "proc::capabilities_come_from_their_field_alone",
    "proc::cgroup_owner_is_parsed_from_the_path",
    "proc::memory_map_lines_are_distinguished",
    "proc::mount_table_walk_always_ends",
    "proc::process_name_shifts_no_field_of_stat",
    "seal::changed_token_is_never_unsealed",
];

/// The test of an agent whose clients never end their headers.
const HTTP_PROBES: &[&str] = &["http::probes_are_answered_when_headers_never_end"];

/// Selects a test of the target `confined`, whose runner (libtest-mimic) takes a single name.
const fn confined(names: &'static [&'static str; 1]) -> TestSelection {
    TestSelection {
        target: &["--test", "confined"],
        names,
        ignored: false,
        env: &[],
    }
}

/// The checks of the area, except the cluster's trials and the tests of `operator/api/server`.
pub(super) const CHECKS: &[NamedCheck] = &[
    NamedCheck {
        name: "security/confined",
        promise: "a process that loads libcuda has no capability, starts no other program and has no network; one that calls NVML has two capabilities, no network and cannot read the agent's token; the agent has nine capabilities and cannot mount",
        long: false,
        tests: &[
            confined(&["driver_process_is_refused_what_it_never_needs"]),
            confined(&["nvml_process_reads_no_token_and_keeps_two_rights"]),
            confined(&["agent_starts_programs_and_is_refused_mounts"]),
            confined(&["unconfined_process_is_refused_nothing_of_it"]),
        ],
    },
    NamedCheck {
        name: "security/exports-believed",
        promise: "an export never counts as less than its process reported before, also at its exit, and the agent's own number of accounts counts",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["container::tests::exports_stay_charged_when_the_page_is_lowered"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/page-accounts",
        promise: "a process that writes another number of accounts into its credit page hides none of them from the agent",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "credit_page::tests::page_keeps_its_accounts_when_a_tenant_overwrites_the_count",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exporters",
        promise: "the agent keeps the orphaned exports of at most 1,024 exited processes of a container apart, and charges those of all",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["accounts::tests::exporters_kept_apart_are_few_and_all_are_charged"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exports-neighbours",
        promise: "exports of living processes delay the release of orphaned exports of their own container, and of no other container",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "orphan_bound::tests::live_exports_delay_reclaim_of_their_container_alone",
                "orphan_bound::tests::live_exports_explain_nothing_that_is_listed",
                "orphan_bound::tests::bound_never_falls_below_orphaned_bytes_and_reaches_zero",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exports-listed",
        promise: "memory that the driver lists for a container's processes explains no unlisted memory, whatever they report as exported; managed memory does",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::listed_export_accounts_for_no_unattributed_memory",
                "audit::compare::tests::managed_memory_on_a_gpu_is_accounted_for",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/allowance-once",
        promise: "the process allowance counts once a container, with at most a tenth of its quota, and processes beyond the contexts that fit the quota are a finding",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::container_is_over_quota_one_byte_beyond_its_allowance",
                "audit::compare::tests::container_is_over_quota_when_contexts_do_not_fit",
                "audit::compare::tests::honest_containers_are_no_finding_in_any_world",
                "audit::compare::tests::memory_beyond_all_allowances_is_always_a_finding",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/contextless",
        promise: "memory that a pod's process owns without a context is charged to it by the kernel module's report, with a session or without; the agent ignores a report of unknown layout",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::collect::tests::contextless_memory_is_charged_to_processes_of_pods_alone",
                "audit::compare::tests::contextless_memory_beyond_the_quota_is_found_with_a_session",
                "audit::compare::tests::listed_exited_process_is_unaccounted_without_an_account",
                "holders::tests::answer_is_believed_only_when_it_lists_the_asker",
                "holders::tests::imported_memory_is_apart_from_owned",
                "holders::tests::parameters_have_the_kernel_modules_sizes",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/hidden-mounts",
        promise: "a container whose first process changed its root or ended its main thread keeps its allocation; its mounts are read by another process or thread, or it is not attested",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "attestation::probe::tests::container_keeps_its_allocation_when_its_first_process_hides_mounts",
                "attestation::probe::tests::hidden_container_is_not_attested_after_5_s_when_it_was_never_seen",
                "attestation::probe::tests::mounts_are_read_by_the_next_process_or_thread_with_the_root",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/hidden-mounts-agent",
        promise: "the whole agent names a process past the shim within 2 s and ends it within 5 s under kill, although the container's first process changed its root or ended its main thread; a neighbour with a session is spared",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["findings::process_is_killed_when_the_first_process_hides_the_mounts"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/pod-owns",
        promise: "a process past the shim in any container of a pod is charged to an allocation of that pod",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::process_belongs_to_its_pod_when_its_container_is_unknown",
                "audit::compare::tests::process_belongs_to_the_allocation_whose_cgroup_is_unknown",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/pod-owns-agent",
        promise: "the whole agent charges a process in a container without GPU memory to its pod, and ends it within 5 s under kill",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["findings::process_in_a_container_without_gpu_memory_is_its_pods"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/ended-memory",
        promise: "memory that the driver lists for a process which is gone for 5 s is unaccounted; a process without a session that has device nodes mapped is a suspect in any container, and no honest one is",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::ended_process_is_charged_while_in_usage",
                "audit::compare::tests::memory_of_a_listed_ended_process_is_unaccounted_once_it_stays",
                "audit::compare::tests::process_that_has_an_ended_ones_mappings_is_a_holder",
                "audit::compare::tests::unaccounted_memory_names_the_only_container_with_the_gpu",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/ended-memory-agent",
        promise: "the whole agent names a forked child that keeps memory of an ended process within 12 s, and ends it within 15 s under kill; a neighbour's session and its forked worker are spared",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["findings::child_that_keeps_memory_of_an_ended_process_is_killed"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/first-listing",
        promise: "no process that started after its pid was first listed is taken for the listed one; one that started during a slow answer is",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::listings::tests::process_that_started_after_the_first_listing_is_not_the_listed_one",
                "audit::listings::tests::process_is_listed_when_it_started_during_a_slow_answer",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/full-list",
        promise: "a full list of the kernel module's is no answer",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["holders::tests::answer_that_is_full_is_no_answer"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/importers",
        promise: "a process that imported more than twice what all containers exported, while as much is unaccounted, is a finding, and ended under kill only if no other pod has such a process; one that imports a neighbour's exports is none",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::importer_is_a_holder_when_it_imports_more_than_anybody_exported",
                "holders::tests::imported_memory_is_apart_from_owned",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/outsiders",
        promise: "a process of a pod without GPU memory is ended under kill unless its namespace is exempt, audit.killOutsiders is off or it has no more than the tolerance",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::policy::tests::process_of_a_pod_without_gpu_memory_is_killed_unless_exempt",
                "pod_namespaces::tests::namespace_is_that_of_the_folder_with_the_uid",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/outsiders-agent",
        promise: "the whole agent ends a process of a pod without GPU memory under kill, and spares one in an exempt namespace",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["findings::process_of_a_pod_without_gpu_memory_is_killed_unless_exempt"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/adversary-audit",
        promise: "30,000 random steps of two hostile pods beside an honest one (changed root, ended first thread, fork after taking, passed device nodes, laid pids, clients made by ended children): memory beyond a quota is found, and no innocent is named, charged or ended",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::adversary::hostile_pod_is_found_and_no_innocent_is_accused",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/adversary-audit-million",
        promise: "a million random steps of two hostile pods beside an honest one: memory beyond a quota is found, and no innocent is named, charged or ended",
        long: true,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::adversary::hostile_pod_is_found_and_no_innocent_is_accused",
            ],
            ignored: false,
            env: &[("BURSAR_ADVERSARY_STEPS", "1000000")],
        }],
    },
    NamedCheck {
        name: "security/holders-judged",
        promise: "while memory is unaccounted, a process that uses the driver without session and context is a finding, and an honest one never is; the agent kills it only if no other pod has such a process; unaccounted memory counts within a window",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::process_is_a_holder_when_driver_is_mapped_without_session",
                "audit::compare::tests::honest_process_is_no_holder_when_memory_is_unattributed",
                "audit::compare::tests::child_is_a_holder_when_it_maps_the_driver_itself",
                "audit::compare::tests::holders_are_all_named_when_of_several_containers",
                "audit::compare::tests::unaccounted_memory_names_the_only_container_with_the_gpu",
                "audit::policy::tests::holder_is_killed_only_when_it_is_the_only_suspect",
                "audit::consecutive::tests::unaccounted_memory_counts_once_within_its_window",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/holders-found",
        promise: "the whole agent finds 7 GiB without a context within 2 s, beside 7 GiB that are listed and reported as exported, in a quota of 8, and kills the process within seconds under kill; it accuses no process within cuInit, no exporter and no forked child of an exporter in another pod",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &[
                "findings::process_that_holds_memory_without_context_is_found",
                "findings::process_that_holds_memory_without_context_is_killed",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exports-unsaid",
        promise: "the whole agent charges an exporter that writes 0 into its page, leaves the descriptor in a socket and exits, until the memory is released",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["reclaim::export_denied_before_exit_stays_charged"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/together",
        promise: "the agent places all containers of a pod or none: 4+4+12+12 and two pods of 7+9 start on two GPUs of 16, init containers and sidecars are not summed, and planned memory is released with the pod",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "pod_groups"],
            names: &[
                "pod_of_4_4_12_12_fits_on_two_gpus_of_16",
                "two_pods_of_7_and_9_fit_on_two_gpus_of_16",
                "pod_that_does_not_fit_whole_takes_no_memory",
                "planned_places_survive_a_restart_and_end_with_the_pod",
                "planned_places_are_dropped_when_no_retry_comes",
                "init_and_main_containers_share_memory",
                "spread_container_keeps_its_place_after_an_init_container",
                "failed_gpu_drops_planned_places_and_pod_is_replanned",
                "restarted_container_leaves_planned_places_of_others",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/together-kubelet",
        promise: "all containers of a pod start together over the agent's plugin and a fake kubelet's checkpoint",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "kubelet"],
            names: &["answers::all_containers_of_a_pod_start_when_they_fit_together"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/together-agent",
        promise: "the agent places a pod's containers together across its restarts",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "allocator::tests::containers_of_a_pod_are_placed_together_across_restart",
                "pod_resolver::tests::device_ids_of_all_containers_of_the_pod_are_returned",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/mig-not-spread",
        promise: "a container larger than a MIG instance waits with that reason, and is never spread over instances",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "pod_groups"],
            names: &["claim_beyond_a_mig_instance_waits_with_that_reason"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/mig-shares",
        promise: "the binder splits no request over MIG instances",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["binder::tests::request_is_not_split_over_mig_instances"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/one-account",
        promise: "containers with the same device ids share one quota: exported and retained memory of the first counts against the next, and both together never exceed the quota",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "container::tests::siblings::exports_count_against_the_next_container_of_a_claim",
                "container::tests::siblings::charges_count_against_the_next_container_of_a_claim",
                "container::tests::siblings::exports_of_another_claim_are_inherited_within_the_quota",
                "container::tests::siblings::containers_of_a_claim_never_exceed_its_quota",
                "allocator::tests::exports_of_init_container_are_charged_to_the_next",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/withheld",
        promise: "memory that is in use and charged to no container is bound to no pod, from ten samples on and until three samples after its release",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::withheld::tests::memory_is_withheld_after_ten_samples",
                "audit::withheld::tests::withheld_memory_falls_after_three_samples",
                "audit::withheld::tests::peak_withholds_nothing",
                "audit::withheld::tests::memory_stays_withheld_when_freed_for_one_sample_in_nine",
                "audit::withheld::tests::withheld_memory_is_stable_under_noise",
                "audit::withheld::tests::memory_of_untracked_processes_is_uncharged",
                "audit::withheld::tests::withheld_memory_stays_when_gpu_does_not_answer",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/withheld-ledger",
        promise: "the ledger binds no withheld memory, changes no binding, and names withheld memory to queued claims",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["withheld::tests::withheld_memory_is_not_bound_and_bindings_stay"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/withheld-agent",
        promise: "the whole agent binds memory past the shim that outlives its pod to no other pod until its release",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["reclaim::uncharged_memory_is_withheld"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/context-size",
        promise: "the charge of a CUDA context is the agent's own measurement, per boot, GPU and driver; tenants cannot change it, and the agent measures again after a malformed file",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "tests::context_size_is_independent_of_what_tenants_say",
                "context_size::tests::context_size_is_the_last_measurement_and_outlives_agents",
                "context_size::tests::implausible_context_size_is_not_recorded",
                "context_size::tests::context_sizes_are_unmeasured_when_the_file_is_malformed",
                "scrub_check::tests::scrub_check_continues_after_measurement",
                "scrub_check::tests::scrub_check_output_is_bounded",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/context-measured",
        promise: "the whole agent measures a context of each GPU once a boot, without retained memory, and also with a file of an older version",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "leases"],
            names: &["measured::agent_measures_contexts_itself_and_once_a_boot"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/context-scrub-check",
        promise: "the scrub check has a context and no other memory until the agent lets it continue",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "provisioner"],
            names: &["scrub_check_has_only_a_context_until_it_continues"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fdstore-memory",
        promise: "an fd store filled to its bound with the longest blobs stays within its memory limit",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "fdstore"],
            names: &["full_fd_store_stays_within_its_memory"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fdstore-share",
        promise: "a namespace that fills the fd store leaves other namespaces their share; leases that are being created count",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "leases::tests::namespace_that_fills_the_fd_store_leaves_others_a_share",
                "leases::tests::lease_of_an_older_agent_is_read_with_its_key",
                "leases::tests::longest_blob_fits_into_the_fd_store",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/lease-names",
        promise: "names of leases are printable ASCII and of bounded length",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["messages::retained::tests::lease_name_is_printable_and_bounded"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/node-events-first",
        promise: "the lease task handles events of the node before all requests of tenants",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["lease_handle::tests::node_is_heard_before_all_questions_of_tenants"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/unscrubbed",
        promise: "a GPU without a passed scrub check serves its first namespace until the node reboots, over restarts, ended pods and random histories; a pod of unknown namespace gets no memory of it",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "isolation::tests::unscrubbed_gpu_stays_with_its_first_namespace",
                "isolation::tests::pod_of_unknown_namespace_has_no_unscrubbed_gpu",
                "isolation::tests::missing_tenant_history_closes_unscrubbed_gpus",
                "isolation::tests::unscrubbed_gpu_has_one_namespace_per_boot",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/unscrubbed-agent",
        promise: "the whole agent over a driver that does not clear memory gives each GPU to one namespace, with the reason; over a driver that does, or with allow-unscrubbed, namespaces share GPUs",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "leases"],
            names: &[
                "shared::unscrubbed_gpu_serves_one_namespace_until_reboot",
                "shared::scrubbed_or_allowed_gpu_is_shared_by_namespaces",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/unscrubbed-told",
        promise: "the condition MemoryScrubbed reports a GPU without a passed scrub check, and the node stays ready",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["node_report::tests::missing_retained_memory_is_reported_with_a_reason"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/other-gpus",
        promise: "honest programs of root, whose libcuda creates the nodes of every GPU, are no finding on two GPUs; the agent reports a container that may open another GPU, or that it cannot test, with cgroup v2 too",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &[
                "devices::honest_root_programs_cause_no_finding",
                "devices::container_that_may_open_another_gpu_is_found",
                "devices::container_is_reported_unattested_when_probe_fails",
                "devices::container_is_attested_when_cgroup_v2_decides",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/other-gpus-asked",
        promise: "the agent tests only containers that can have other GPUs, ends a test process without an answer in time, and writes to cgroup folders only; with cgroup v2, alone or beside v1, it tests the deciding cgroup",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "attestation::device_access::tests::query_is_refused_when_folder_is_no_cgroup",
                "attestation::device_access::tests::wait_ends_when_the_child_does_not_answer",
                "attestation::device_access::tests::can_open_is_unknown_when_the_node_is_missing",
                "attestation::evaluate::tests::device_check_is_needed_with_mknod_or_other_nodes",
                "attestation::evaluate::tests::openable_node_of_another_gpu_is_a_gap",
                "attestation::device_access::tests::container_of_v2_alone_has_one_cgroup",
                "attestation::device_access::tests::container_has_a_cgroup_of_devices_and_one_of_v2_beside_v1",
                "attestation::device_access::tests::first_cgroup_inside_that_takes_processes_is_joined",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/large-processes",
        promise: "3 x 65,000 mappings with paths of 3,200 bytes and 3 x 100 GiB of environment: reported as not attested, the agent's peak grows by at most 64 MiB, a neighbour's p99 stays below 100 ms",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["large::attestation_memory_is_bounded_for_huge_processes"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/proc-bounds",
        promise: "the agent reads files of tenant processes only up to bounds of bytes and lines, in listed modules only; a container whose processes cannot all be read within 60 s is reported as not attested",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "procfs::tests::small_file_beyond_its_bound_is_too_large",
                "procfs::tests::lines_end_at_the_first_bound",
                "procfs::tests::only_listed_files_read_files_directly",
                "attestation::maps::tests::driver_files_are_bounded",
                "attestation::evaluate::tests::gap_detail_is_truncated",
                "pod_cgroups::tests::processes_in_nested_cgroups_of_a_container_are_listed",
                "attestation::probe::tests::container_is_not_attested_when_a_process_waits_for_60_s",
                "attestation::probe::tests::process_that_waited_longest_is_read_first",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/event-storm",
        promise: "a storm of one pod's Events leaves room for those of other pods, equal Events are one in five minutes, and no Event of a finding contains a pid of the host; under waves of findings and faults, with an API server that responds late and then never, the whole agent sends as many Events as its bounds allow, a neighbour's p99 stays below 100 ms, and resident memory does not grow",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "events::tests::event_storm_of_a_pod_leaves_room_for_other_pods",
                    "events::tests::equal_events_are_one_event_in_each_window",
                    "events::tests::events_over_the_rate_are_dropped_and_counted",
                    "events::tests::repeated_event_is_created_once_and_never_changed",
                    "audit::events::tests::event_of_a_finding_names_no_pid",
                    "faults::events::tests::message_of_a_fault_has_cause_generation_and_action",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "security"],
                names: &["events::events_are_bounded_when_processes_come_in_waves"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "security/crash-loops",
        promise: "60 crash loops under the policy kill, with audits that wait 0.4 s between NVML and the accounts: no process is accused or killed",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["honest::crash_looping_program_causes_no_finding"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/crash-orders",
        promise: "20,000 random histories of processes that start, end, leave memory with others and reuse pids, in every order with an audit's steps: no finding",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "audit::compare::tests::interleavings::honest_processes_are_no_finding_in_any_interleaving",
                "audit::compare::tests::interleavings::exit_between_nvml_and_accounts_is_no_finding",
                "audit::compare::tests::reused_pid_is_charged_for_exited_process_up_to_its_bytes",
                "audit::collect::tests::zombie_is_not_live",
                "audit::collect::tests::own_process_is_live_and_an_unused_pid_is_not",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/time-slice",
        promise: "the agent reports CAP_SYS_NICE over the host with a reason of its own, and serves the container",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["devices::container_that_may_change_its_timeslice_is_reported"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/crash-loops-1000",
        promise: "1,000 crash loops under the policy kill: no process is accused or killed",
        long: true,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["honest::program_crashing_a_thousand_times_causes_no_finding"],
            ignored: true,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/honest-two-gpus",
        promise: "10 minutes of honest programs of root on two GPUs: no finding",
        long: true,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &["devices::honest_programs_cause_no_finding_in_minutes"],
            ignored: true,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/passed-descriptors",
        promise: "the kernel refuses descriptors that a process passes over its socket, and on older kernels a thread of its own closes them: a neighbour's p99 stays below 100 ms with two provisioners, with and without hello, out of band, refused, and at the end of sessions",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "tests::passed::neighbour_is_served_when_kernel_refuses_descriptors",
                "tests::passed::neighbour_is_served_when_passed_sockets_linger",
                "tests::passed::neighbour_is_served_when_refused_sockets_linger",
                "tests::passed::neighbour_is_served_when_sessions_end_with_lingering_sockets",
                "tests::passed::container_is_not_accepted_while_its_sockets_linger",
                "tests::passed::accepted_socket_takes_no_descriptor_when_disabled",
                "tests::passed::listener_is_dropped_at_once_when_unaccepted_sockets_linger",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/lingering-agent",
        promise: "the whole agent with two provisioners under six lingering sockets: a neighbour's p99 stays below 100 ms, and resident memory and descriptors do not grow",
        long: false,
        tests: &[TestSelection {
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
        promise: "8,000 hellos of a process that keeps each page get it no more than 1,024",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "security"],
            names: &["socket::credit_pages_are_bounded_when_a_process_keeps_them"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/credit-pages-books",
        promise: "a container has at most 1,024 pages however long processes keep them, and pages of exited processes are reused, so that honest churn can continue",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "container::pages::tests::pages_stay_bounded_however_long_they_are_kept",
                "container::pages::tests::dropped_pages_are_replaced_at_one_a_second",
                "container::pages::tests::pages_are_reused_when_processes_exit",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/abandoned-hellos",
        promise: "the page that a process uses goes to no other process, however many hellos the process abandons",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "container::tests::used_page_is_not_reused_when_hellos_are_abandoned",
                "container::tests::recording::late_request_is_dropped_when_its_process_says_hello_again",
                "tests::handshake::hello_is_dropped_when_its_peer_has_hung_up",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/exited-requests",
        promise: "the agent keeps no account of a process that exits while its request waits",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "container::tests::recording::exited_process_gets_no_account_when_its_request_is_late",
                "accounts::tests::process_has_no_account_when_its_whole_grant_is_revoked",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/work-is-paid",
        promise: "messages are charged for their processor time; requests share one write of the record, and are answered only after it",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "rate_limit::tests::message_is_charged_for_its_cpu_time",
                "rate_limit::tests::cpu_time_counts_work_and_not_sleep",
                "container::tests::recording::requests_share_a_write_when_writes_are_late",
                "container::tests::recording::checkpoint_is_written_at_most_20_times_a_second",
                "container::tests::recording::request_is_refused_when_the_checkpoint_is_not_written",
                "container::tests::recording::hello_waits_for_the_checkpoint_when_writes_are_late",
                "container::tests::recording::exports_wait_for_the_checkpoint_when_writes_are_late",
                "tests::handshake::hello_waits_for_its_turn_before_the_kernel_log",
                "faults::task::tests::hello_causes_no_round_beyond_a_read_of_the_log",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/crowd",
        promise: "512 processes that start at once all get their grants, and a neighbour's p99 stays below 100 ms, or 50 times its time without the load on a busy machine",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "security"],
            names: &["socket::neighbour_is_answered_when_512_processes_start"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/one-look",
        promise: "one sample of a GPU serves all containers that wait for memory of ended images",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["tests::driver_is_sampled_once_for_all_waiting_containers"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/outermost-pod",
        promise: "a container's own cgroup folders never count as another pod's",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["peer::tests::container_is_none_for_other_cgroups"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/contended-word",
        promise: "the agent stops its attempts on a word that is written without pause, and grants the image no more memory",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["atomic_credit::tests::agent_gives_up_when_a_word_is_written_without_pause"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/contended-image",
        promise: "the agent fences an image whose page accepts no grant",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &["container::tests::recording::image_is_fenced_when_its_page_takes_no_grant"],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/xid-records",
        promise: "names of programs and files in the kernel's log decide nothing; nor do records that a program wrote, records of another GPU, or records without NVML's event",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "faults::kmsg::tests::tenant_text_in_a_record_is_no_xid_line",
                "faults::kmsg::tests::line_is_ignored_without_pid_or_context_xid",
                "faults::confirmation::tests::record_is_dropped_when_nvml_does_not_confirm_it",
                "faults::confirmation::tests::confirmation_needs_an_event_of_that_gpu_and_code",
                "container::tests::poisoned::xid_names_the_gpu_of_a_container_with_several",
                "container::tests::poisoned::xid_is_ignored_when_it_predates_the_process",
                "container::tests::poisoned::xid_of_an_image_is_ignored_by_its_successor",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/xid-records-agent",
        promise: "the whole agent fences and kills no process for forged records of the kernel's log, and acts on a real XID",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "audit"],
            names: &[
                "faults::foreign_kernel_log_record_fences_no_process",
                "faults::fault_of_a_silent_program_is_found_in_the_kernel_log",
                "faults::reported_fault_returns_the_error_and_kills_the_container",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fuzz-frames",
        promise: "random frames (shim, fd store, provisioner, memory ids) are an error or the one message that encodes to them, and credit pages of any content stay bounded",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "fuzz"],
            names: FRAMES,
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fuzz-text",
        promise: "random tokens, kernel log records, files of /proc, kubelet checkpoints, CDI files, session records and the agent's checkpoints cause no panic, and each target's own property holds",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "fuzz"],
            names: TEXTS,
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/fuzz-frames-long",
        promise: "10 million random frames of each kind are an error or the one message that encodes to them, and credit pages stay bounded",
        long: true,
        tests: &[TestSelection {
            target: &["--test", "fuzz"],
            names: FRAMES,
            ignored: false,
            env: &[("BOLERO_RANDOM_ITERATIONS", "10000000")],
        }],
    },
    NamedCheck {
        name: "security/fuzz-text-long",
        promise: "a million random texts of each kind cause no panic, and each target's own property holds",
        long: true,
        tests: &[TestSelection {
            target: &["--test", "fuzz"],
            names: TEXTS,
            ignored: false,
            env: &[("BOLERO_RANDOM_ITERATIONS", "1000000")],
        }],
    },
    NamedCheck {
        name: "security/adversary",
        promise: "a seeded hostile tenant performs random actions on the whole agent for some seconds: no grant beyond the quota, no neighbour late, killed or refused, no leftover resources; each oracle rejects a history that breaks its promise",
        long: false,
        tests: &[TestSelection {
            target: &["--test", "security"],
            names: &[
                "adversary::adversary_harms_nobody_but_itself",
                "fixture::tests::violation_is_none_when_agent_is_as_before",
                "fixture::tests::violation_names_each_limit_that_a_load_exceeds",
                "oracles::tests::charged_units_are_the_sum_of_a_record",
                "oracles::tests::charged_units_fail_when_any_part_passes_the_quota",
                "oracles::tests::charged_units_fail_when_a_list_has_another_name",
                "oracles::tests::sleeps_in_a_close_is_true_for_runtime_threads_only",
                "oracles::tests::stuck_task_is_reported_after_four_samples_in_a_close",
                "oracles::tests::neighbour_violation_names_what_the_neighbour_lost",
                "oracles::tests::false_finding_names_a_finding_of_another_container",
                "oracles::tests::false_finding_is_reported_when_no_audits_are_seen",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/adversary-million",
        promise: "a seeded hostile tenant performs a million random actions on the whole agent: no grant beyond the quota, no neighbour late, killed or refused, no leftover resources",
        long: true,
        tests: &[TestSelection {
            target: &["--test", "security"],
            names: &["adversary::adversary_harms_nobody_but_itself"],
            ignored: false,
            env: &[("BURSAR_ADVERSARY_STEPS", "1000000")],
        }],
    },
    NamedCheck {
        name: "security/http",
        promise: "10,000 connections with unfinished headers: RSS within 64 MiB, all closed, a probe on its own listener answered within 100 ms at p99; idle connections do not block probes; a further connection closes the oldest of the address that has most; metrics are encoded once for concurrent requests; oversized headers are refused; the whole agent under 1,000 such connections does not grow, and answers its neighbour and its probes within 100 ms, or 50 times its time without the load on a busy machine",
        long: false,
        tests: &[
            TestSelection {
                target: &["--test", "flood"],
                names: &[
                    "unfinished_headers_hold_little_and_are_closed",
                    "idle_connections_leave_room_for_probes",
                    "metrics_are_encoded_once_for_all_who_ask",
                    "oversized_headers_are_refused",
                    "each_path_is_served_on_its_own_listener",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "security"],
                names: HTTP_PROBES,
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: LIB,
                names: &[
                    "connections::tests::oldest_connection_of_the_busiest_address_is_superfluous",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "security/http-long",
        promise: "the whole agent under 10,000 connections with unfinished headers does not grow, and answers its neighbour and its probes within 100 ms",
        long: true,
        tests: &[TestSelection {
            target: &["--test", "security"],
            names: HTTP_PROBES,
            ignored: false,
            env: &[("BURSAR_LONG", "1")],
        }],
    },
    NamedCheck {
        name: "security/nodes-word",
        promise: "whatever the GpuNode of a node reports, the operator evicts, relocates or counts no pod of another node",
        long: false,
        tests: &[TestSelection {
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
        promise: "a borrower is evicted whatever its Job's policy, and after the grace whatever its disruption budget",
        long: false,
        tests: &[TestSelection {
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
        name: "security/unanswered-evictions",
        promise: "an eviction that the API server does not answer counts as refused, so that a namespace full of pods keeps no borrower",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "placement::history::tests::unanswered_evictions_count_as_refusals",
                "budget::state::tests::unanswered_eviction_is_refused_and_ineffective",
                "budget::state::tests::denied_eviction_is_ineffective_but_not_refused",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/leftovers",
        promise: "the agent ends the processes of a pod 30 s after its grace period or its removal, counts its memory as leaked meanwhile, and never touches a pod of which the operator has reported no end",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "leftovers::tests::live_processes_of_the_pod_alone_are_listed",
                "leftovers::tests::pod_is_over_30_s_after_its_grace",
                "leftovers::tests::pod_is_over_30_s_after_it_is_gone",
                "leftovers::tests::pod_that_was_never_listed_is_not_over",
                "leftovers::tests::second_deletion_shortens_the_grace_and_never_extends_it",
                "node_report::tests::memory_of_a_pod_with_leftover_processes_is_reported_as_leaked",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/one-image",
        promise: "a process that says hello under another image number without an exec stays fenced, and no process can feign an exec",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "container::tests::poisoned::new_image_number_without_an_exec_ends_no_fault",
                "peer::tests::image_memory_is_replaced_by_an_exec_alone",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/console",
        promise: "kubectl bursar asks no pod that a tenant labelled as Bursar's, writes its archive to a new private file, and shows no control or bidirectional characters",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "run::installation::tests::archive_is_new_and_private",
                    "table::tests::control_characters_do_not_reach_the_terminal",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "cli"],
                names: &["api::pod_that_a_tenant_labels_as_an_agent_is_not_asked"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "security/static-pods",
        promise: "an owner reference of kind Node protects no pod from preemption, a mirror annotation counts only for its own pod and with a Node as the controller, and config.hash changes nothing",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "cluster::placement_index::pod::tests::owner_is_read_from_the_controller_reference",
                "placement::plan::tests::node_reports::mirror_annotation_impersonates_no_other_pod",
                "cluster::pod_settings::tests::only_a_mirror_pod_has_the_uid_of_an_annotation",
                "cluster::pod_settings::tests::mirror_pod_replaces_no_real_pod",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/pods-name",
        promise: "an agent looks up a pod's settings by the UID in the kubelet's checkpoint and never by name, and replaces an unreadable checkpoint by nothing",
        long: false,
        tests: &[TestSelection {
            target: LIB,
            names: &[
                "pod_resolver::tests::pod_of_the_same_name_gives_no_settings",
                "pod_resolver::tests::unreadable_checkpoint_is_replaced_by_no_other_answer",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "security/pod-settings",
        promise: "an agent learns a pod's priority and GPUs from the operator alone: 500 pods at once over two GPUs each are told to their nodes, and wait 24 s for a late operator; while it is away each pod waits 3 s, and has priority 0 and one GPU, as its Events say; of annotations the agent gets only those that it reads",
        long: false,
        tests: &[
            TestSelection {
                target: LIB,
                names: &[
                    "pod_settings::tests::settings_that_are_there_are_read_at_once",
                    "pod_settings::tests::pod_without_an_api_server_waits_for_nothing",
                    "pod_settings::tests::late_operator_is_waited_for_by_500_pods",
                    "pod_settings::tests::silent_operator_delays_later_pods_for_3_s",
                    "pod_settings::tests::agent_that_has_read_no_object_waits_for_3_s",
                    "pod_settings::tests::wait_ends_with_the_deletion_of_its_pod_alone",
                    "pod_resolver::tests::checkpoint_names_the_pod_and_operator_the_rest",
                    "actor::handle::tests::pod_without_settings_is_told_what_was_assumed",
                    "actor::handle::tests::wait_ends_with_the_operators_word_of_a_deletion",
                    "gpu_node::pod_settings::tests::settings_have_the_annotations_that_agents_read",
                    "cluster::pod_settings::tests::pods_on_the_node_have_priority_and_annotations",
                    "cluster::pod_settings::tests::settings_are_due_until_the_object_has_them",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "operator"],
                names: &[
                    "pod_settings::all_of_500_pods_at_once_are_told_to_their_nodes",
                    "pod_settings::settings_are_written_after_refusals_and_go_with_the_pod",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;
    use crate::paths;

    #[test]
    fn every_test_of_the_target_security_is_named() {
        let selections = CHECKS.iter().flat_map(|check| check.tests);
        let of_target = selections.filter(|tests| tests.target == ["--test", "security"]);
        let names = of_target.flat_map(|tests| tests.names);
        let named: BTreeSet<&str> = names.filter_map(|name| name.rsplit("::").next()).collect();
        let folder = paths::repository().join("device-plugin/tests/security");
        let mut written = BTreeSet::new();
        for entry in fs::read_dir(folder).unwrap() {
            let source = fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
            let attributes = ["#[test]", "#[tokio::test"];
            let is_test = |line: &&str| attributes.iter().any(|text| line.contains(text));
            let mut lines = source.lines();
            while lines.find(is_test).is_some() {
                let function = lines.next().and_then(|line| line.split_once("fn "));
                let name = function.and_then(|(_, rest)| rest.split('(').next());
                written.extend(name.map(str::to_owned));
            }
        }
        assert_eq!(named, written.iter().map(String::as_str).collect());
    }
}
