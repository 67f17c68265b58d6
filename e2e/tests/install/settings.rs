//! Checks names, labels, images, service accounts and the other settings of the chart.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::render::{Objects, arguments, chart, pod_spec, refusal, render, try_render};

fn images(objects: &Objects) -> BTreeSet<String> {
    let specs = objects.pod_specs().into_iter();
    specs
        .map(|spec| spec["containers"][0]["image"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn global_registry_replaces_the_images_own() {
    let moved = render(&[r#"global.imageRegistry="mirror.local:5000/hub""#]);
    let wanted =
        ["agent", "operator"].map(|part| format!("mirror.local:5000/hub/bursar/{part}:0.1.0"));
    assert_eq!(images(&moved), BTreeSet::from(wanted));
}

#[test]
fn image_without_a_registry_is_refused_with_the_way_to_one() {
    let none = r#"global.imageRegistry="""#;
    let refused = refusal(&[none]);
    let reason = "the image bursar/agent has no registry, because no release is published; make a \
                  release by docs/internals/release.md";
    assert!(refused.contains(reason), "{refused}");
    let agent = |image: &str| format!("agent.image={image}");
    let operator = r#"operator.image.registry="a.example""#;
    for (image, rendered) in [
        (r#"{"repository":"localhost/a","tag":"t"}"#, "localhost/a:t"),
        (r#"{"repository":"host:5000/a","tag":"t"}"#, "host:5000/a:t"),
        (
            r#"{"registry":"host","repository":"a","tag":"t"}"#,
            "host/a:t",
        ),
    ] {
        let found = images(&render(&[none, operator, &agent(image)]));
        assert!(found.contains(rendered), "{found:?}");
    }
}

#[test]
fn image_has_the_tag_beside_its_digest() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let objects = render(&[&format!(r#"operator.image.digest="{digest}""#)]);
    assert!(images(&objects).contains(&format!("registry.example/bursar/operator:0.1.0@{digest}")));
}

#[test]
fn pull_secrets_reach_every_pod() {
    let objects = render(&[r#"global.imagePullSecrets=[{"name":"a"}]"#]);
    for spec in objects.pod_specs() {
        assert_eq!(spec["imagePullSecrets"], json!([{ "name": "a" }]));
    }
    assert!(
        render(&[])
            .pod_specs()
            .iter()
            .all(|spec| spec["imagePullSecrets"].is_null())
    );
}

#[test]
fn names_contain_the_charts_name_or_the_override() {
    let names = |release: &str, values: &[&str]| {
        let objects = try_render(release, "bursar-system", values).ok().unwrap();
        let agents = objects
            .of_kind("DaemonSet")
            .map(|set| set["metadata"]["name"].clone());
        agents
            .map(|name| name.as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let all = ["bursar-agent", "bursar-fdstore", "bursar-relay"];
    assert_eq!(names("bursar", &[]), all);
    assert_eq!(
        names("gpu", &[]),
        ["gpu-bursar-agent", "gpu-bursar-fdstore", "gpu-bursar-relay"]
    );
    let chosen = [r#"fullnameOverride="share""#];
    let all = ["share-agent", "share-fdstore", "share-relay"];
    assert_eq!(names("gpu", &chosen), all);
}

#[test]
fn ended_containers_say_why() {
    let objects = render(&[]);
    let own = [
        objects.agent(),
        objects.fdstore(),
        objects.operator(),
        objects.relay(),
    ];
    for container in own.map(|workload| &pod_spec(workload)["containers"][0]) {
        let policy = &container["terminationMessagePolicy"];
        assert_eq!(policy, "FallbackToLogsOnError", "{}", container["name"]);
    }
}

#[test]
fn common_labels_are_on_every_object() {
    let objects = render(&[r#"commonLabels={"cost":"ml"}"#]);
    for object in &objects.0 {
        assert_eq!(
            object["metadata"]["labels"]["cost"], "ml",
            "{}",
            object["metadata"]
        );
    }
    let selector = &objects.agent()["spec"]["selector"]["matchLabels"];
    assert!(selector["cost"].is_null(), "a selector never changes");
}

#[test]
fn pods_have_their_own_labels_and_annotations() {
    for (part, kind, name) in [
        ("agent", "DaemonSet", "bursar-agent"),
        ("retainedMemory", "DaemonSet", "bursar-fdstore"),
        ("operator", "Deployment", "bursar-operator"),
    ] {
        let objects = render(&[
            &format!(r#"{part}.podLabels={{"mesh":"off"}}"#),
            &format!(r#"{part}.podAnnotations={{"note":"1"}}"#),
        ]);
        let metadata = &objects.get(kind, name)["spec"]["template"]["metadata"];
        assert_eq!(metadata["labels"]["mesh"], "off");
        assert_eq!(metadata["annotations"]["note"], "1");
    }
}

#[test]
fn accounts_can_be_brought_along_with_their_policies() {
    let objects = render(&[
        r#"agent.serviceAccount={"create":false,"name":"mine"}"#,
        r#"operator.serviceAccount.annotations={"a":"b"}"#,
    ]);
    let accounts: Vec<_> = objects.of_kind("ServiceAccount").collect();
    assert_eq!(accounts.len(), 1, "only the operator's is created");
    assert_eq!(accounts[0]["metadata"]["annotations"]["a"], "b");
    assert_eq!(pod_spec(objects.agent())["serviceAccountName"], "mine");
    let binding = objects.get("ClusterRoleBinding", "bursar-agent");
    assert_eq!(binding["subjects"][0]["name"], "mine");
    let policy = &objects.get("ValidatingAdmissionPolicy", "bursar-agents")["spec"];
    let condition = policy["matchConditions"][0]["expression"].as_str().unwrap();
    assert!(
        condition.contains("system:serviceaccount:bursar-system:mine"),
        "{condition}"
    );
}

#[test]
fn account_is_refused_when_shared_or_the_default_one() {
    let agent = r#"agent.serviceAccount={"create":false,"name":"a"}"#;
    let operator = r#"operator.serviceAccount={"create":false,"name":"a"}"#;
    for (values, remedy) in [
        (
            &[r#"agent.serviceAccount.create=false"#][..],
            "set agent.serviceAccount.name to another account",
        ),
        (
            &[agent, r#"operator.serviceAccount.create=false"#],
            "set operator.serviceAccount.name to another account",
        ),
        (
            &[r#"operator.serviceAccount.name="default""#],
            "set operator.serviceAccount.name to another account",
        ),
        (&[agent, operator], "to different accounts"),
    ] {
        let refused = refusal(values);
        assert!(refused.contains(remedy), "{refused}");
    }
}

#[test]
fn node_folders_are_mounted_and_configured_alike() {
    let (state, run) = ("/home/kubernetes/bin/bursar", "/run/gpu");
    let objects = render(&[
        &format!(r#"node.stateDir="{state}""#),
        &format!(r#"node.runDir="{run}""#),
    ]);
    let spec = pod_spec(objects.agent());
    let of = |list: &Value, name: &str| {
        let list = list.as_array().unwrap();
        list.iter()
            .find(|entry| entry["name"] == name)
            .unwrap()
            .clone()
    };
    let config = objects.agent_config();
    for (name, folder) in [("state", state), ("run", run)] {
        assert_eq!(of(&spec["volumes"], name)["hostPath"]["path"], folder);
        let mounts = &spec["containers"][0]["volumeMounts"];
        assert_eq!(of(mounts, name)["mountPath"], folder);
        let line = format!("{name}-dir = \"{folder}\"");
        assert!(config.contains(&line), "{config}");
    }
    let socket = format!("fdstore-socket = \"{run}/fdstore/fdstore.sock\"");
    assert!(config.contains(&socket), "{config}");
    assert!(
        config.contains(&format!("relay-dir = \"{run}/relay\"")),
        "{config}"
    );
    for (part, workload) in [("fdstore", objects.fdstore()), ("relay", objects.relay())] {
        let folder = &of(&pod_spec(workload)["volumes"], "run")["hostPath"]["path"];
        assert_eq!(*folder, format!("{run}/{part}"));
    }
}

#[test]
fn notes_have_a_manifest_that_can_be_pasted() {
    let notes = std::fs::read_to_string(chart().join("templates/NOTES.txt")).unwrap();
    let (_, manifest) = notes.split_once("<<END\n").unwrap();
    // A shell ends the text at this line only.
    assert!(manifest.lines().any(|line| line == "END"), "{notes}");
    assert!(manifest.starts_with("apiVersion: "), "{notes}");
}

#[test]
fn ports_and_folders_that_collide_are_refused() {
    for (value, remedy) in [
        (
            "agent.metricsPort=9402",
            "set agent.probePort to another port",
        ),
        (
            "operator.probePort=9401",
            "set operator.probePort to another port",
        ),
        (
            r#"node.runDir="/var/lib/bursar""#,
            "set node.runDir to a folder on a tmpfs",
        ),
    ] {
        let refused = refusal(&[value]);
        assert!(refused.contains(remedy), "{refused}");
    }
}

#[test]
fn renamed_value_is_refused_with_its_new_name() {
    let renamed = std::fs::read_to_string(chart().join("templates/validation.yaml")).unwrap();
    let (_, renamed) = renamed.split_once("$renamed := dict\n").unwrap();
    let (renamed, _) = renamed.split_once("}}").unwrap();
    let pairs = renamed.trim().lines().map(|line| {
        let mut names = line.split('"');
        (names.nth(1).unwrap(), names.nth(1).unwrap())
    });
    let pairs: Vec<_> = pairs.collect();
    assert_eq!(pairs.len(), 13);
    for (old, new) in pairs {
        let reason = format!("the value {old} is now {new}; set that in its place");
        let refused = refusal(&[&format!("{old}=1")]);
        assert!(refused.contains(&reason), "{old}: {refused}");
    }
}

#[test]
fn agent_and_operator_take_the_same_kinds_of_settings() {
    let part = |part: &str| {
        [
            format!(r#"{part}.logFormat="text""#),
            format!(r#"{part}.extraArgs=["--x"]"#),
            format!(r#"{part}.extraEnv=[{{"name":"A","value":"1"}}]"#),
        ]
    };
    let values = [part("agent"), part("operator")].concat();
    let values: Vec<_> = values.iter().map(String::as_str).collect();
    let objects = render(&values);
    for workload in [objects.agent(), objects.operator()] {
        let arguments = arguments(workload);
        assert!(arguments.contains(&"--log-format=text") && arguments.contains(&"--x"));
        let env = pod_spec(workload)["containers"][0]["env"]
            .as_array()
            .unwrap();
        assert!(env.contains(&json!({ "name": "A", "value": "1" })));
    }
}

#[test]
fn default_context_action_reaches_agents_and_operator() {
    for (values, action) in [
        (&[][..], "Process"),
        (&[r#"contextPolicy.default="Report""#][..], "Report"),
    ] {
        let objects = render(values);
        let config = objects.agent_config();
        let section = format!("[context-policy]\ndefault = \"{action}\"");
        assert!(config.contains(&section), "{config}");
        let argument = format!("--context-policy-default={action}");
        assert!(arguments(objects.operator()).contains(&&*argument));
    }
    let refused = refusal(&[r#"contextPolicy.default="Evict""#]);
    assert!(refused.contains("contextPolicy"), "{refused}");
}

#[test]
fn agent_port_is_not_dcgm_exporters() {
    let objects = render(&[]);
    let ports = &pod_spec(objects.agent())["containers"][0]["ports"];
    assert_eq!(
        ports[0],
        json!({ "name": "metrics", "containerPort": 9445 })
    );
    assert!(pod_spec(objects.agent())["hostNetwork"].is_null());
    let host = render(&["agent.hostNetwork=true"]);
    assert_eq!(pod_spec(host.agent())["hostNetwork"], true);
}

#[test]
fn agent_registers_with_the_relay_unless_it_is_off() {
    let line = r#"relay-dir = "/run/bursar/relay""#;
    assert!(render(&[]).agent_config().contains(line));
    let off = render(&["relay.enabled=false"]);
    assert!(!off.agent_config().contains("relay-dir"));
    assert!(off.find("DaemonSet", "bursar-relay").is_none());

    let objects = render(&[r#"node.kubeletDir="/k""#, "relay.withdrawAfterSeconds=60"]);
    let relay = objects.relay();
    assert_eq!(relay["spec"]["updateStrategy"]["type"], "OnDelete");
    assert_eq!(
        arguments(relay),
        ["--kubelet-dir=/k/device-plugins", "--withdraw-after=60"]
    );
    let mounts = &pod_spec(relay)["containers"][0]["volumeMounts"];
    assert_eq!(mounts[0]["mountPath"], "/k/device-plugins");
    assert_eq!(mounts[1]["mountPath"], "/run/bursar/relay");
    let context = &pod_spec(relay)["containers"][0]["securityContext"];
    assert_eq!(context["capabilities"], json!({ "drop": ["ALL"] }));
    assert_eq!(pod_spec(relay)["automountServiceAccountToken"], false);
    let agent = &pod_spec(objects.agent())["containers"][0]["volumeMounts"];
    let plugins = agent.as_array().unwrap().iter();
    let plugins = plugins.filter(|mount| mount["name"] == "device-plugins");
    assert!(plugins.clone().all(|mount| mount["readOnly"] == true));
    assert_eq!(plugins.count(), 1);
}
