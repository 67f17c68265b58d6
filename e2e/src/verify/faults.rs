//! Names the checks of the area `faults/`, each with the tests that show it.

use super::named::{NamedCheck, Tests};

/// The libraries' own tests.
const LIB: &[&str] = &["--lib"];
/// The tests of the watch that agent and operator share.
const WATCH: &[&str] = &["--test", "watch"];
/// The tests of objects that another version wrote.
const VERSIONS: &[&str] = &["--test", "versions"];

/// Every check of the area that runs without a cluster.
pub(super) const CHECKS: &[NamedCheck] = &[
    NamedCheck {
        name: "faults/api-restored",
        shows: "agents and watches list anew after a restore of etcd, and the status is written again",
        long: false,
        tests: &[
            Tests {
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
            Tests {
                target: LIB,
                names: &[
                    "status::tests::orders_and_status_follow_a_restored_etcd",
                    "history::tests::write_below_the_newest_revision_asks_for_a_list",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/api-backoff",
        shows: "5,000 clients of an API server that is away back off, whether their lists fail or their watches end at once",
        long: false,
        tests: &[Tests {
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
        shows: "a value or an order of another version of the API stops nothing but itself",
        long: false,
        tests: &[
            Tests {
                target: VERSIONS,
                names: &[
                    "budget_is_read_when_an_enum_has_a_later_value",
                    "gpu_node_is_read_when_an_enum_has_a_later_value",
                    "schema_refuses_the_value_that_stands_for_unknown_ones",
                ],
                ignored: false,
                env: &[],
            },
            Tests {
                target: LIB,
                names: &[
                    "status::tests::order_of_another_version_stops_nothing_else",
                    "status::spec::tests::order_of_another_shape_is_named_and_the_rest_is_read",
                    "node::report::tests::unknown_orders_are_a_condition_and_the_node_stays_ready",
                ],
                ignored: false,
                env: &[],
            },
        ],
    },
    NamedCheck {
        name: "faults/api-deleted",
        shows: "a GpuNode that is deleted is made again within seconds, owned by the present Node, and lifts no drain",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "status::tests::deleted_object_is_made_again_within_seconds",
                "status::tests::object_is_owned_by_the_node_as_registered_now",
                "status::tests::drain_outlives_the_object_that_ordered_it",
                "status::tests::drain_on_record_outlives_object_and_agent",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/api-agent",
        shows: "an agent's status and orders arrive whatever becomes of one write, and however a watch tells",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "status::tests::status_and_orders_arrive_however_a_watch_tells",
                "status::tests::status_arrives_whatever_becomes_of_a_write",
                "status::tests::lost_answer_counts_as_silence_from_the_request_on",
                "agent::tests::watch_goes_on_while_it_has_nothing_to_tell",
            ],
            ignored: false,
            env: &[],
        }],
    },
    NamedCheck {
        name: "faults/clock-agent",
        shows: "windows and deadlines of faults, and the numbers of process images, do not follow the wall clock",
        long: false,
        tests: &[Tests {
            target: LIB,
            names: &[
                "sessions::poison::tests::deadlines_hold_when_the_wall_clock_goes_back",
                "sessions::poison::tests::record_of_an_older_agent_is_read_and_its_times_are_long_ago",
                "sessions::container::tests::poisoned::a_lost_record_issues_no_number_twice",
            ],
            ignored: false,
            env: &[],
        }],
    },
];
