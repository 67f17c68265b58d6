//! Compares tables with recorded ones.

use bursar_cli::show::{budgets, events, gpus, retained, top};
use bursar_cli::snapshot::{Kind, Snapshot};
use bursar_cli::table::Terminal;
use bursar_cli::{uninstall, version};
use serde_json::json;

use crate::fixtures::{NOW, cluster, condition, golden, gpu, gpu_node, node, parse, pod, tenant};

const PLAIN: Terminal = Terminal {
    colour: false,
    width: None,
    clears: false,
    wide: false,
    no_headers: false,
};

#[test]
fn gpus_match_the_recorded_tables() {
    let snapshot = cluster();
    golden("gpus", &gpus::render(&snapshot, None, PLAIN));
    golden(
        "gpus-wide",
        &gpus::render(
            &snapshot,
            None,
            Terminal {
                wide: true,
                ..PLAIN
            },
        ),
    );
    golden(
        "gpus-narrow",
        &gpus::render(
            &snapshot,
            None,
            Terminal {
                width: Some(60),
                ..PLAIN
            },
        ),
    );
    golden(
        "gpus-colour",
        &gpus::render(
            &snapshot,
            None,
            Terminal {
                colour: true,
                ..PLAIN
            },
        ),
    );
    golden(
        "gpus-one-node",
        &gpus::render(&snapshot, Some("gpu-a-1"), PLAIN),
    );
}

#[test]
fn other_tables_match_the_recorded_ones() {
    let snapshot = cluster();
    golden("top", &top::render_pods(&snapshot, PLAIN));
    golden(
        "top-narrow",
        &top::render_pods(
            &snapshot,
            Terminal {
                width: Some(80),
                ..PLAIN
            },
        ),
    );
    golden("top-tenant", &top::render_pods(&tenant(cluster()), PLAIN));
    golden("top-namespaces", &top::render_namespaces(&snapshot, PLAIN));
    golden("budgets", &budgets::render(&snapshot, PLAIN));
    golden(
        "budgets-wide",
        &budgets::render(
            &snapshot,
            Terminal {
                wide: true,
                ..PLAIN
            },
        ),
    );
    golden("events", &events::render(&snapshot, Some(3600), PLAIN));
    golden("retained", &retained::render(&snapshot, PLAIN));
    golden("uninstall", &uninstall::render(&snapshot, PLAIN));
    golden("version", &version::render(&snapshot));
}

#[test]
fn uninstall_removes_the_node_labels_that_it_counts() {
    let labelled = |name: &str, keys: &[&str]| {
        let mut node = node(name);
        for key in keys {
            node["metadata"]["labels"][*key] = json!("1");
        }
        parse(node)
    };
    let snapshot = Snapshot {
        nodes: vec![
            labelled(
                "a",
                &["bursar.dev/largest-free-mib-512", "kubernetes.io/os"],
            ),
            labelled(
                "b",
                &["bursar.dev/agent", "bursar.dev/largest-free-mib-512"],
            ),
            labelled("c", &["kubernetes.io/os"]),
        ],
        ..Snapshot::default()
    };
    let found = uninstall::remainders(&snapshot);
    assert_eq!(found[0].text, "2 nodes with labels of Bursar");
    assert_eq!(
        found[0].command,
        "kubectl label node --all bursar.dev/agent- bursar.dev/largest-free-mib-512-"
    );
}

#[test]
fn uninstall_removes_crds_without_objects() {
    let mut empty = Snapshot::default();
    let commands = |snapshot: &Snapshot| {
        let found = uninstall::remainders(snapshot).into_iter();
        found.map(|remainder| remainder.command).collect::<Vec<_>>()
    };
    let crds = "kubectl delete crd gpumemorybudgets.bursar.dev gpunamespaces.bursar.dev gpunodes.bursar.dev";
    assert_eq!(commands(&empty)[0], crds);
    for kind in [Kind::GpuNodes, Kind::Budgets] {
        empty.unread.insert(kind, "forbidden".to_owned());
    }
    assert_eq!(commands(&empty), Vec::<String>::new());
}

#[test]
fn uninstall_names_the_release_that_is_installed() {
    let workload = json!({ "metadata": { "name": "gpu-bursar-agent", "namespace": "gpus",
        "labels": { "app.kubernetes.io/instance": "gpu" } } });
    let snapshot = Snapshot {
        daemon_sets: vec![parse(workload.clone())],
        deployments: vec![parse(workload)],
        ..Snapshot::default()
    };
    let found = uninstall::remainders(&snapshot);
    assert_eq!(found[0].text, "1 release of the chart");
    assert_eq!(found[0].command, "helm uninstall gpu --namespace gpus");
}

#[test]
fn empty_cluster_has_sentences_instead_of_tables() {
    let empty = Snapshot {
        now: NOW.parse().unwrap(),
        ..Snapshot::default()
    };
    assert_eq!(gpus::render(&empty, None, PLAIN), "No node has GPUs\n");
    assert_eq!(top::render_pods(&empty, PLAIN), "No pod has GPU memory.\n");
    assert_eq!(budgets::render(&empty, PLAIN), "No budgets.\n");
    let without_crds = Snapshot {
        absent: [Kind::GpuNodes, Kind::Budgets].into(),
        ..empty
    };
    assert_eq!(
        uninstall::render(&without_crds, PLAIN),
        "Nothing of Bursar is left in the API.\n"
    );
}

/// The terminals of the recorded tables: a pipe, narrow and wide ones, with colours, `-o wide`.
const TERMINALS: [(&str, Terminal); 5] = [
    ("pipe", PLAIN),
    (
        "40 columns",
        Terminal {
            width: Some(40),
            ..PLAIN
        },
    ),
    (
        "80 columns, colour",
        Terminal {
            width: Some(80),
            colour: true,
            ..PLAIN
        },
    ),
    (
        "200 columns, colour",
        Terminal {
            width: Some(200),
            colour: true,
            ..PLAIN
        },
    ),
    (
        "200 columns, wide",
        Terminal {
            width: Some(200),
            wide: true,
            ..PLAIN
        },
    ),
];

/// A cluster with this many GPUs, eight on a node. Every third has a pod, and every hundredth,
/// beginning with the last, is lost.
fn with_gpus(count: usize) -> Snapshot {
    let mut snapshot = Snapshot {
        now: NOW.parse().unwrap(),
        ..Snapshot::default()
    };
    let numbers: Vec<usize> = (0..count).collect();
    for (node, gpus) in numbers.chunks(8).enumerate() {
        let node = format!("node-{node:03}");
        let gpus = gpus.iter().enumerate().map(|(index, number)| {
            let pod_name = format!("pod-{number}");
            let uid = format!("ml-{pod_name}");
            let has_pod = number % 3 == 0;
            if has_pod {
                snapshot.pods.push(parse(pod("ml", &pod_name, &node, 16)));
            }
            let owners: &[(&str, i32)] = if has_pod { &[(&uid, 16)] } else { &[] };
            let mut gpu = gpu(
                &format!("GPU-{number:04}"),
                i32::try_from(index).unwrap(),
                79,
                owners,
            );
            if count > 1 && number % 100 == 99 {
                gpu["state"] = json!("Lost");
                gpu["health"] = json!({ "status": "Unhealthy", "reason": "Xid79" });
            }
            gpu
        });
        let gpus = gpus.collect();
        snapshot.gpu_nodes.push(parse(gpu_node(&node, gpus)));
    }
    snapshot
}

/// The first and the last lines of a long text, with the number of the others. Escape sequences of
/// colours are written as `<31>`.
fn ends(text: &str) -> String {
    let text = text.replace("\u{1b}[0m", "<>").replace("\u{1b}[", "<");
    let text = ["31", "32", "33"].iter().fold(text, |text, code| {
        text.replace(&format!("<{code}m"), &format!("<{code}>"))
    });
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= 12 {
        return text;
    }
    let (first, last) = (lines[..3].join("\n"), lines[lines.len() - 3..].join("\n"));
    format!("{first}\n({} more lines)\n{last}\n", lines.len() - 6)
}

#[test]
fn tables_of_0_1_and_1000_gpus_match_in_every_terminal() {
    let mut all = String::new();
    for count in [0, 1, 1000] {
        let snapshot = with_gpus(count);
        for (name, terminal) in TERMINALS {
            let rendered = [
                ("gpus", gpus::render(&snapshot, None, terminal)),
                ("top", top::render_pods(&snapshot, terminal)),
            ];
            for (command, text) in rendered {
                all.push_str(&format!(
                    "== {command}: {count} GPUs, {name}\n{}",
                    ends(&text)
                ));
                let plain = text.replace("\u{1b}[0m", "");
                let plain = ["\u{1b}[31m", "\u{1b}[32m", "\u{1b}[33m"]
                    .iter()
                    .fold(plain, |plain, code| plain.replace(code, ""));
                assert!(!plain.contains('\u{1b}'), "{command}: {plain}");
                let table = plain
                    .lines()
                    .filter(|line| !line.contains(" GPUs on ") && !line.contains(" GPU on "));
                let widest = table.map(|line| line.chars().count()).max().unwrap_or(0);
                assert!(
                    widest <= terminal.width.unwrap_or(usize::MAX),
                    "{command}: {name}: {widest}"
                );
            }
        }
    }
    golden("terminals", &all);
}

#[test]
fn gpus_name_the_pods_for_which_memory_is_held() {
    let mut held = gpu("GPU-1", 0, 79, &[("a", 20)]);
    held["reservedFor"] = json!("big");
    held["largestFree"] = json!(9);
    held["setAside"] = json!([
        { "uid": "big", "namespace": "ml", "name": "big-0", "quanta": 40 },
        { "uid": "unnamed", "quanta": 10 },
    ]);
    let node = parse(gpu_node("n", vec![held]));
    let snapshot = Snapshot {
        gpu_nodes: vec![node],
        ..Snapshot::default()
    };
    let text = gpus::render(&snapshot, None, PLAIN);
    let note = "held for ml/big-0, the pod with UID unnamed";
    assert!(text.contains(note), "{text}");
}

#[test]
fn message_of_an_agent_is_shown_without_escapes() {
    let mut node = gpu_node("n", vec![]);
    node["status"]["conditions"] =
        json!([condition("GpusFound", "False", "NoGpus", "none\u{1b}[2J")]);
    let text = gpus::without_gpus(&parse(node)).unwrap();
    assert_eq!(text, "n has no GPUs: NoGpus: none [2J");
}

#[test]
fn totals_count_claims_and_faults_beyond_the_lists() {
    let mut node = gpu_node("n", vec![gpu("GPU-1", 0, 79, &[])]);
    node["status"]["summary"] = json!({ "waiting": 40, "faults": 70 });
    let snapshot = Snapshot {
        gpu_nodes: vec![parse(node)],
        ..Snapshot::default()
    };
    let text = gpus::render(&snapshot, None, PLAIN);
    assert!(text.ends_with("40 waiting, 70 faults\n"), "{text}");
}

#[test]
fn thousand_gpus_and_one_have_a_row_each() {
    let nodes = |count: i32| Snapshot {
        gpu_nodes: (0..count)
            .map(|number| {
                let gpus = (0..8)
                    .map(|index| gpu(&format!("GPU-{number}-{index}"), index, 79, &[]))
                    .collect();
                parse(gpu_node(&format!("node-{number:03}"), gpus))
            })
            .collect(),
        ..Snapshot::default()
    };
    let text = gpus::render(&nodes(125), None, PLAIN);
    assert_eq!(text.lines().count(), 1002);
    assert!(text.ends_with(
        "1000 GPUs on 125 nodes: 0 of 79000 GiB bound, largest free 79 GiB, 0 waiting, 0 faults\n"
    ));
    let one = Snapshot {
        gpu_nodes: vec![parse(gpu_node("n", vec![gpu("GPU-1", 0, 79, &[])]))],
        ..Snapshot::default()
    };
    let text = gpus::render(&one, None, PLAIN);
    assert!(
        text.ends_with(
            "1 GPU on 1 node: 0 of 79 GiB bound, largest free 79 GiB, 0 waiting, 0 faults\n"
        ),
        "{text}"
    );
}

#[test]
fn narrow_terminal_is_never_exceeded() {
    let snapshot = cluster();
    for width in [20, 40, 60, 80, 100, 140] {
        let terminal = Terminal {
            width: Some(width),
            ..PLAIN
        };
        let tables = [
            gpus::render(
                &snapshot,
                None,
                Terminal {
                    no_headers: true,
                    ..terminal
                },
            ),
            top::render_pods(&snapshot, terminal),
            events::render(&snapshot, None, terminal),
        ];
        for line in tables.iter().flat_map(|table| table.lines()) {
            assert!(line.chars().count() <= width, "{width}: {line}");
        }
    }
}

#[test]
fn json_has_the_documented_shape() {
    let snapshot = cluster();
    let top = top::pods_json(&tenant(cluster()));
    assert_eq!(top["apiVersion"], "cli.bursar.dev/v1");
    assert_eq!(top["items"][0]["quotaBytes"], 50_u64 << 30);
    assert_eq!(top["notRead"][0], "could not read gpunodes: forbidden");
    assert_eq!(
        budgets::names(&snapshot)[0],
        "gpumemorybudget.bursar.dev/default"
    );
}
