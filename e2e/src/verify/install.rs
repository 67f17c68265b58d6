//! Names the checks of the area `install/`, each with its tests.

use super::named::{NamedCheck, TestSelection};

/// Selects tests of the rendered chart.
const fn of_chart(names: &'static [&'static str]) -> TestSelection {
    TestSelection {
        target: &["--test", "install"],
        names,
        ignored: false,
        env: &[],
    }
}

/// The checks of the area, except the cluster's trials.
pub(super) const CHECKS: &[NamedCheck] = &[
    NamedCheck {
        name: "install/values",
        promise: "the schema has Kubernetes' own definitions and refuses misspelt fields; the schema, the chart's README and its annotations are what values.yaml and the templates say",
        long: false,
        tests: &[of_chart(&[
            "generated::annotations_name_the_images_and_kinds",
            "generated::every_value_has_a_comment",
            "generated::readme_has_the_table_of_values",
            "generated::schema_has_comments_and_kubernetes_definitions",
            "generated::schema_refuses_misspelt_fields_with_their_path",
        ])],
    },
    NamedCheck {
        name: "install/images",
        promise: "one value moves all images to a mirror, pull secrets reach every pod, and a digest does not hide the tag",
        long: false,
        tests: &[of_chart(&[
            "settings::global_registry_replaces_the_images_own",
            "settings::image_has_the_tag_beside_its_digest",
            "settings::pull_secrets_of_both_places_reach_every_pod",
        ])],
    },
    NamedCheck {
        name: "install/names",
        promise: "names, labels, annotations, service accounts and folders can be chosen, and the admission policies follow them",
        long: false,
        tests: &[of_chart(&[
            "policies::namespace_default_is_refused_with_a_sentence",
            "settings::accounts_can_be_brought_along_with_their_policies",
            "settings::agent_and_operator_take_the_same_kinds_of_settings",
            "settings::agent_registers_with_the_relay_unless_it_is_off",
            "settings::agent_port_is_not_dcgm_exporters",
            "settings::common_labels_are_on_every_object",
            "settings::names_contain_the_charts_name_or_the_override",
            "settings::pods_have_their_own_labels_and_annotations",
            "settings::node_folders_are_mounted_and_configured_alike",
        ])],
    },
    NamedCheck {
        name: "install/nodes",
        promise: "agents run only on nodes with a label of a GPU, or where the admin says, never two on a node",
        long: false,
        tests: &[of_chart(&[
            "placement::agents_are_updated_as_chosen_and_never_doubled",
            "placement::agents_run_on_gpu_nodes_only_by_default",
            "placement::own_affinity_replaces_the_default",
            "placement::probes_leave_time_to_start_and_never_end_fd_store_or_relay",
        ])],
    },
    NamedCheck {
        name: "install/operator",
        promise: "the operator has two replicas, a Lease, a disruption budget and a critical priority that the quota of the namespace covers; a replica stops before another may take its Lease",
        long: false,
        tests: &[
            of_chart(&[
                "placement::critical_pods_quota_covers_both_priorities",
                "placement::operator_has_two_replicas_and_a_lease",
            ]),
            TestSelection {
                target: &["--lib"],
                names: &[
                    "leader::tests::dead_replicas_lease_is_taken_after_its_duration",
                    "leader::tests::holder_stops_before_another_may_take_the_lease",
                    "leader::tests::holder_stops_when_another_has_the_lease",
                    "leader::tests::restarted_container_takes_its_pods_lease_at_once",
                    "leader::tests::second_replica_waits_until_the_first_gives_up",
                    "leader::tests::shutdown_ends_the_wait",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "install/policies",
        promise: "tenants' rules can begin with warnings; network policies, roles, OpenShift's binding and security contexts are as documented",
        long: false,
        tests: &[of_chart(&[
            "policies::mutating_policies_follow_the_cluster_or_the_value",
            "policies::namespace_roles_read_budgets_and_nothing_of_others",
            "policies::network_policies_limit_metrics_and_the_way_out",
            "policies::openshift_gets_its_binding_and_no_fixed_user",
            "policies::pods_but_agent_and_fd_store_are_restricted",
            "policies::tenants_rules_can_begin_with_warnings",
            "policies::test_pod_requests_one_quantum_and_checks_its_size",
        ])],
    },
    NamedCheck {
        name: "install/simulated",
        promise: "values-simulated.yaml lays the simulated driver out where agents and pods read it, and a restart of its pod keeps the GPUs' state",
        long: false,
        tests: &[
            of_chart(&[
                "simulated::agents_read_the_folder_of_the_simulated_driver",
                "simulated::driver_is_simulated_only_on_request",
                "simulated::simulated_gpus_are_as_many_and_as_large_as_chosen",
            ]),
            TestSelection {
                target: &["--lib"],
                names: &["folder::tests::state_is_kept_on_the_same_boot_with_the_same_gpus"],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "install/beside-nvidia",
        promise: "values-gpu-operator.yaml reads the driver container; another plugin with the same GPUs is told, and by choice the node offers nothing; driver upgrades and MIG manager drain GPUs; programs of the host are allowed by name",
        long: false,
        tests: &[
            of_chart(&[
                "simulated::driver_containers_files_are_read_and_its_upgrades_followed",
                "simulated::host_programs_are_allowed_by_name",
            ]),
            TestSelection {
                target: &["--lib"],
                names: &[
                    "audit::collect::tests::only_the_hosts_programs_are_allowed_by_name",
                    "cluster::nvidia_labels::tests::admins_drain_stays_when_ours_is_returned",
                    "cluster::nvidia_labels::tests::drain_names_every_gpu_and_is_returned_once",
                    "cluster::nvidia_labels::tests::drain_stays_while_the_agent_has_no_driver",
                    "cluster::nvidia_labels::tests::driver_upgrade_drains_from_pod_deletion_to_validation",
                    "cluster::nvidia_labels::tests::mig_manager_drains_while_it_reconfigures",
                    "other_plugins::tests::plugin_with_healthy_gpus_is_another_owner",
                ],
                ignored: false,
                env: &[],
            },
            TestSelection {
                target: &["--test", "agent"],
                names: &[
                    "observability::node_with_another_owner_offers_nothing_by_choice",
                    "observability::other_owner_of_gpus_is_reported_and_pods_are_bound",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "install/artifacts",
        promise: "a release joins architectures, refuses changed blobs and other versions, writes digests into the chart and changes nothing else there, and lists each package once",
        long: false,
        tests: &[TestSelection {
            target: &["--lib"],
            names: &[
                "images::artifact::tests::joined_layout_has_the_images_of_both_architectures",
                "images::artifact::tests::take_over_refuses_a_blob_with_another_digest",
                "images::oci::tests::compressed_image_has_the_same_content_and_user",
                "release::changelog::tests::entry_is_the_text_below_the_versions_heading",
                "release::changelog::tests::only_a_pre_release_takes_unreleased_changes",
                "release::chart::tests::annotation_names_the_released_images",
                "release::chart::tests::values_name_the_default_registry",
                "release::chart::tests::values_name_the_released_images_and_nothing_else_changes",
                "release::chart::tests::values_without_an_image_are_refused",
                "release::destination::tests::destination_is_a_registry_if_it_begins_with_a_host",
                "release::destination::tests::version_is_that_of_the_workspace_or_a_pre_release",
                "release::sbom::tests::joined_bill_lists_each_package_once",
                "release::sbom::tests::library_has_the_hash_of_its_file",
                "release::tests::checksums_name_every_file_but_themselves",
                "release::tests::joined_parts_have_every_image_bill_and_archive",
            ],
            ignored: false,
            env: &[],
        }],
    },
];
