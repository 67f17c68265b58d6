//! Checks the patches of `drain`, `undrain` and `resize`, and the archive of `support`.

use bursar_cli::act::drain;
use bursar_cli::act::resize::{self, Resized};
use bursar_cli::act::roll;
use bursar_cli::objects::Pod;
use bursar_cli::support;
use bursar_crds::{GpuMemoryBudget, GpuNode};
use serde_json::json;

use crate::fixtures::{budget, cluster, golden, gpu, gpu_node, own_pod, parse, pod};

fn two_gpus() -> GpuNode {
    parse(gpu_node(
        "n",
        vec![
            gpu("GPU-5e1c", 0, 79, &[("ml-p", 8)]),
            gpu("GPU-5eff", 1, 79, &[]),
        ],
    ))
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn gpus_are_named_by_index_uuid_or_its_beginning() {
    let node = two_gpus();
    let uuids = |arguments: &[&str]| {
        let selected = drain::selected(&node, &words(arguments));
        selected.map(|all| all.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>())
    };
    assert_eq!(uuids(&[]).unwrap(), ["GPU-5e1c", "GPU-5eff"]);
    assert_eq!(uuids(&["1"]).unwrap(), ["GPU-5eff"]);
    assert_eq!(uuids(&["GPU-5e1"]).unwrap(), ["GPU-5e1c"]);
    assert!(matches!(
        uuids(&["GPU-5e"]),
        Err(drain::GpuArgumentError::Ambiguous { .. })
    ));
    assert!(matches!(
        uuids(&["7"]),
        Err(drain::GpuArgumentError::NotFound { .. })
    ));
    let bare: GpuNode = parse(gpu_node("cpu", vec![]));
    assert!(matches!(
        drain::selected(&bare, &[]),
        Err(drain::GpuArgumentError::NoGpus(_))
    ));
}

#[test]
fn drain_keeps_other_drains_and_the_version() {
    let mut node = two_gpus();
    node.spec.drain = vec!["GPU-other".to_owned()];
    let first = drain::selected(&node, &words(&["0"])).unwrap();
    let patch = drain::drain_patch(&node, &first).unwrap();
    assert_eq!(
        patch,
        json!({ "metadata": { "resourceVersion": "7" }, "spec": { "drain": ["GPU-5e1c", "GPU-other"] } })
    );
    let mut drained = node.clone();
    drained.spec.drain.push("GPU-5e1c".to_owned());
    let first = drain::selected(&drained, &words(&["0"])).unwrap();
    assert_eq!(drain::drain_patch(&drained, &first), None);
    let first = drain::drained(&drained, &words(&["0"])).unwrap();
    let patch = drain::undrain_patch(&drained, Some(&first)).unwrap();
    assert_eq!(patch["spec"]["drain"], json!(["GPU-other"]));
    assert_eq!(
        drain::undrain_patch(&drained, None).unwrap()["spec"]["drain"],
        json!([])
    );
    assert_eq!(drain::undrain_patch(&two_gpus(), None), None);
}

#[test]
fn drain_ends_when_its_gpu_has_left_the_status() {
    let mut node: GpuNode = parse(gpu_node("n", vec![]));
    node.spec.drain = words(&["GPU-5e1c", "GPU-5eff"]);
    let drained = |arguments: &[&str]| drain::drained(&node, &words(arguments));
    assert_eq!(drained(&["GPU-5e1c"]), Ok(words(&["GPU-5e1c"])));
    assert_eq!(drained(&["GPU-5ef"]), Ok(words(&["GPU-5eff"])));
    assert!(matches!(
        drained(&["GPU-5e"]),
        Err(drain::GpuArgumentError::Ambiguous { .. })
    ));
    assert!(matches!(
        drained(&["GPU-7"]),
        Err(drain::GpuArgumentError::NoGpus(_))
    ));
}

#[test]
fn undrain_is_offered_for_the_entry_that_drains() {
    let instance = gpu("MIG-1", 0, 39, &[]);
    let mut node: GpuNode = parse(gpu_node("n", vec![instance]));
    let command = |node: &GpuNode| {
        let gpus = &node.status.as_ref().unwrap().gpus;
        drain::undrain_command(node, &gpus[0])
    };
    node.spec.drain = words(&["GPU-1"]);
    let of_parent = "kubectl bursar undrain n GPU-1";
    assert_eq!(command(&node).as_deref(), Some(of_parent));
    node.spec.drain = words(&["GPU-1", "MIG-1"]);
    let of_instance = "kubectl bursar undrain n MIG-1";
    assert_eq!(command(&node).as_deref(), Some(of_instance));
    let by_operator = json!([{ "manager": "bursar-operator-drain",
        "fieldsV1": { "f:spec": { "f:drain": { ".": {}, "v:\"MIG-1\"": {} } } } }]);
    node.metadata.managed_fields = Some(parse(by_operator));
    assert_eq!(command(&node), None);
}

#[test]
fn drain_says_what_it_costs() {
    let snapshot = cluster();
    let node = snapshot.gpu_node("gpu-a-1").unwrap();
    let all = drain::selected(node, &[]).unwrap();
    golden("drain-cost", &(drain::cost(&snapshot, node, &all) + "\n"));
    let uuids = ["GPU-a0".to_owned()];
    assert_eq!(drain::not_drained(node, &uuids), ["GPU 0 is Active (Ok)"]);
}

#[test]
fn gpu_is_not_drained_by_an_old_status_or_by_none() {
    let mut drained = gpu("GPU-5e1c", 0, 79, &[]);
    drained["state"] = json!("Draining");
    drained["health"] = json!({ "status": "Unhealthy", "reason": "Drained" });
    let mut node: GpuNode = parse(gpu_node("n", vec![drained]));
    let left = |node: &GpuNode, uuid: &str| drain::not_drained(node, &words(&[uuid]));
    assert_eq!(left(&node, "GPU-5e1c"), Vec::<String>::new());
    assert_eq!(
        left(&node, "GPU-gone"),
        ["the agent does not report GPU-gone"]
    );
    node.metadata.generation = Some(2);
    assert_eq!(
        left(&node, "GPU-5e1c"),
        ["the agent has not seen the order"]
    );
    node.status = None;
    assert_eq!(
        left(&node, "GPU-5e1c"),
        ["the agent has not seen the order"]
    );
}

#[test]
fn resize_changes_only_the_pods_own_override() {
    let mut budget: GpuMemoryBudget = parse(budget("ml", 64, 64, 8, 0));
    budget.spec.overrides = vec![parse(json!({ "pod": "other", "deviceMemory": "1Gi" }))];
    let pod = parse(pod("ml", "p", "n", 8));
    let patch = resize::patch(&budget, &pod, Some((Resized::Device, "4Gi")))
        .unwrap()
        .unwrap();
    assert_eq!(
        patch["spec"]["overrides"],
        json!([{ "pod": "other", "deviceMemory": "1Gi" }, { "pod": "p", "deviceMemory": "4Gi" }])
    );
    assert_eq!(patch["metadata"]["resourceVersion"], "9");
    budget
        .spec
        .overrides
        .push(parse(json!({ "pod": "p", "deviceMemory": "4Gi" })));
    assert_eq!(
        resize::patch(&budget, &pod, Some((Resized::Device, "4096Mi"))),
        Ok(None)
    );
    let reset = resize::patch(&budget, &pod, None).unwrap().unwrap();
    assert_eq!(
        reset["spec"]["overrides"],
        json!([{ "pod": "other", "deviceMemory": "1Gi" }])
    );
    assert!(matches!(
        resize::patch(&budget, &pod, Some((Resized::Device, "9Gi"))),
        Err(resize::ResizeError::AboveRequest { .. })
    ));
    assert!(matches!(
        resize::patch(&budget, &pod, Some((Resized::Device, "much"))),
        Err(resize::ResizeError::Amount(_))
    ));
}

#[test]
fn resize_of_one_memory_keeps_the_others_quota() {
    let mut budget: GpuMemoryBudget = parse(budget("ml", 64, 64, 8, 0));
    let mut requesting = pod("ml", "p", "n", 8);
    requesting["spec"]["containers"][0]["resources"]["limits"]["bursar.dev/managed-memory-gib"] =
        json!("16");
    let requesting = parse(requesting);
    let managed = |amount| Some((Resized::Managed, amount));
    budget.spec.overrides = vec![parse(json!({ "pod": "p", "deviceMemory": "4Gi" }))];
    let patch = resize::patch(&budget, &requesting, managed("12Gi"));
    let both = json!([{ "pod": "p", "deviceMemory": "4Gi", "managedMemory": "12Gi" }]);
    assert_eq!(patch.unwrap().unwrap()["spec"]["overrides"], both);
    budget.spec.overrides = parse(both);
    assert_eq!(
        resize::patch(&budget, &requesting, managed("12Gi")),
        Ok(None)
    );
    let patch = resize::patch(&budget, &requesting, Some((Resized::Device, "2Gi")));
    let both = json!([{ "pod": "p", "deviceMemory": "2Gi", "managedMemory": "12Gi" }]);
    assert_eq!(patch.unwrap().unwrap()["spec"]["overrides"], both);
    let reset = resize::patch(&budget, &requesting, None).unwrap().unwrap();
    assert_eq!(reset["spec"]["overrides"], json!([]));
    assert!(matches!(
        resize::patch(&budget, &requesting, managed("17Gi")),
        Err(resize::ResizeError::AboveRequest { .. })
    ));
    let covered = parse(pod("ml", "p", "n", 8));
    assert!(matches!(
        resize::patch(&budget, &covered, managed("1Gi")),
        Err(resize::ResizeError::NoManaged(_))
    ));
    // An init container that ends gets no quota override.
    let mut initial = pod("ml", "p", "n", 8);
    let mut starting = initial["spec"]["containers"][0].clone();
    starting["resources"]["limits"]["bursar.dev/managed-memory-gib"] = json!("16");
    initial["spec"]["initContainers"] = json!([starting]);
    assert!(matches!(
        resize::patch(&budget, &parse(initial), managed("1Gi")),
        Err(resize::ResizeError::NoManaged(_))
    ));
}

#[test]
fn resize_waits_for_the_agents_state() {
    let pod = parse(pod("ml", "p", "n", 8));
    let mut node = two_gpus();
    let four = Some((Resized::Device, 4_u64 << 30));
    assert_eq!(resize::state(&node, &pod, four), None);
    node.spec.quotas = vec![parse(
        json!({ "podUid": "ml-p", "container": "main", "account": "device", "quota": "4Gi" }),
    )];
    let state = |state: &str| json!([{ "podUid": "ml-p", "container": "main", "account": "device", "state": state, "quota": "4Gi", "used": "6Gi" }]);
    node.status.as_mut().unwrap().quotas = parse(state("Applied"));
    assert_eq!(
        resize::state(&node, &pod, four).unwrap(),
        "ml/p has a quota of 4 GiB."
    );
    assert_eq!(
        resize::state(&node, &pod, Some((Resized::Device, 6 << 30))),
        None
    );
    // The quota of the other memory says nothing.
    assert_eq!(
        resize::state(&node, &pod, Some((Resized::Managed, 4 << 30))),
        None
    );
    node.spec.quotas[0].account = "managed".to_owned();
    let mut managed = state("Applied");
    managed[0]["account"] = json!("managed");
    node.status.as_mut().unwrap().quotas = parse(managed);
    assert_eq!(
        resize::state(&node, &pod, Some((Resized::Managed, 4 << 30))).unwrap(),
        "ml/p has a quota of 4 GiB of managed memory."
    );
    node.spec.quotas[0].account = "device".to_owned();
    node.status.as_mut().unwrap().quotas = parse(state("Pending"));
    assert!(
        resize::state(&node, &pod, four)
            .unwrap()
            .contains("and uses 6 GiB")
    );
    node.metadata.generation = Some(2);
    assert_eq!(resize::state(&node, &pod, four), None);
}

#[test]
fn archive_has_no_variable_argument_or_annotation() {
    let mut snapshot = cluster();
    let mut secret = pod("ml", "secret", "gpu-a-1", 8);
    secret["metadata"]["annotations"] = json!({ "note": "hunter2" });
    secret["spec"]["containers"][0]["env"] = json!([{ "name": "PASSWORD", "value": "hunter2" }]);
    secret["spec"]["containers"][0]["args"] = json!(["--password=hunter2"]);
    snapshot.pods.push(parse(secret));
    let metadata = json!({ "name": "n", "annotations": { "kubectl.kubernetes.io/last-applied-configuration": "hunter2" } });
    snapshot.gpu_nodes[0].metadata = parse(metadata);
    let mut files = support::files(&snapshot, None);
    files.push(support::File::log("bursar-agent-x", "one line\n"));
    for file in &files {
        let text = String::from_utf8_lossy(&file.content);
        assert!(!text.contains("hunter2"), "{}", file.path);
    }
    let archive = support::archive(&files).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(archive.as_slice()));
    let names: Vec<String> = archive
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().display().to_string())
        .collect();
    assert_eq!(names.len(), files.len());
    assert!(
        names.contains(&"bursar-support/logs/bursar-agent-x.log".to_owned()),
        "{names:?}"
    );
}

#[test]
fn roll_replaces_old_relays_or_those_of_the_nodes() {
    let revision = |number: i64, hash: &str| json!({ "revision": number, "metadata": { "labels": { "controller-revision-hash": hash } } });
    let revisions = [revision(2, "b"), revision(10, "c"), revision(1, "a")];
    assert_eq!(roll::newest_revision(&revisions), Some("c"));
    assert_eq!(roll::newest_revision(&[]), None);
    let own = |component: &str, node: &str, hash: &str| -> Pod {
        let mut pod = own_pod(component, node);
        pod["metadata"]["labels"]["controller-revision-hash"] = json!(hash);
        parse(pod)
    };
    let pods = [
        own("relay", "old", "b"),
        own("relay", "new", "c"),
        own("fdstore", "old", "b"),
    ];
    let rolled = |nodes: &[&str]| -> Vec<&str> {
        let relays = roll::relays(&pods, "c", &words(nodes));
        relays
            .iter()
            .map(|pod| pod.spec.node_name.as_str())
            .collect()
    };
    assert_eq!(rolled(&[]), ["old"]);
    assert_eq!(rolled(&["new"]), ["new"]);
    assert_eq!(rolled(&["none"]), [] as [&str; 0]);
}

#[test]
fn roll_waits_for_admissions_and_for_the_registration() {
    let (mut admitted, mut ended) = (pod("ml", "admitted", "n", 8), pod("ml", "ended", "n", 8));
    admitted["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    ended["status"]["phase"] = json!("Failed");
    let mut new = pod("ml", "new", "n", 8);
    new["status"] = json!({ "phase": "Pending" });
    let pods = [admitted, ended, new].map(parse);
    assert_eq!(roll::not_admitted(&pods), ["ml/new"]);

    let old: Pod = parse(own_pod("relay", "n"));
    let mut relay = old.clone();
    let mut node: GpuNode = parse(gpu_node("n", vec![]));
    let mut agent: Pod = parse(own_pod("agent", "n"));
    let lacks = |relay: &Pod, agent: &Pod, node: &GpuNode| {
        roll::lacks(
            &[relay.clone(), agent.clone()],
            node,
            "n",
            &old.metadata.uid,
        )
    };
    assert_eq!(
        lacks(&relay, &agent, &node).unwrap(),
        "a relay that is Ready"
    );
    relay.metadata.uid = "another".to_owned();
    let registered = |status: &str| {
        parse(
            json!({ "type": "Registered", "status": status, "reason": "R", "message": "no kubelet",
            "lastTransitionTime": "2026-01-01T00:00:00Z" }),
        )
    };
    node.status.as_mut().unwrap().conditions = vec![registered("False")];
    assert_eq!(
        lacks(&relay, &agent, &node).unwrap(),
        "its registration: no kubelet"
    );
    node.status.as_mut().unwrap().conditions = vec![registered("True")];
    assert_eq!(lacks(&relay, &agent, &node), None);
    agent.status.conditions.clear();
    assert_eq!(
        lacks(&relay, &agent, &node).unwrap(),
        "an agent that is Ready"
    );
}
