//! Converts manifests in the forms that the peers document.

use bursar_cli::convert::{Assumptions, ConvertError, Converted, convert};
use bursar_crds::Quantum;
use serde_yaml_ng::Value;

const GIB80: Assumptions = Assumptions {
    gpu_memory: Some(80 << 30),
    replicas: Some(4),
    quantum: Quantum::Gib1,
};
const NOTHING: Assumptions = Assumptions {
    gpu_memory: None,
    replicas: None,
    quantum: Quantum::Gib1,
};

/// A pod with these annotations, further fields of its spec, and limits.
fn pod(annotations: &str, spec: &str, limits: &str) -> String {
    let annotations = if annotations.is_empty() {
        String::new()
    } else {
        format!("\n  annotations: {{{annotations}}}")
    };
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: gpu-pod{annotations}\nspec:\n{spec}  containers:\n    - name: main\n      \
         image: ubuntu\n      resources: {{ limits: {{{limits}}} }}\n"
    )
}

fn converted(manifest: &str, assumptions: Assumptions) -> (Converted, Value) {
    let converted =
        convert(manifest, assumptions).unwrap_or_else(|error| panic!("{error}\n{manifest}"));
    let value = serde_yaml_ng::from_str(&converted.yaml).unwrap();
    assert!(
        !converted.yaml.contains("nvidia.com/"),
        "{}",
        converted.yaml
    );
    (converted, value)
}

fn quanta(value: &Value) -> Option<u64> {
    let template = if value["spec"]["template"].is_null() {
        value
    } else {
        &value["spec"]["template"]
    };
    template["spec"]["containers"][0]["resources"]["limits"]["bursar.dev/gpu-memory-gib"].as_u64()
}

#[test]
fn amounts_of_hami_become_quanta() {
    for (limits, wanted) in [
        ("nvidia.com/gpu: 1, nvidia.com/gpumem: 3000", 3),
        ("nvidia.com/gpu: 1, nvidia.com/gpumem: 8000", 8),
        ("nvidia.com/gpu: 1, nvidia.com/gpumem: 10240", 10),
        ("nvidia.com/gpu: \"1\", nvidia.com/gpumem: \"1\"", 1),
        ("nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 50", 40),
        ("nvidia.com/gpu: 1, nvidia.com/gpumem-percentage: 33", 27),
        ("nvidia.com/gpumem: 20000", 20),
    ] {
        let (_, value) = converted(&pod("", "", limits), GIB80);
        assert_eq!(quanta(&value), Some(wanted), "{limits}");
    }
    let halves = Assumptions {
        quantum: Quantum::Mib512,
        ..NOTHING
    };
    let (converted, _) = converted(
        &pod("", "", "nvidia.com/gpu: 1, nvidia.com/gpumem: 3000"),
        halves,
    );
    assert!(
        converted.yaml.contains("bursar.dev/gpu-memory-512mib: 6"),
        "{}",
        converted.yaml
    );
}

#[test]
fn request_of_no_gpu_becomes_no_memory() {
    for limits in [
        "nvidia.com/gpu: 0",
        "nvidia.com/gpu: \"0\", nvidia.com/gpumem: 0",
    ] {
        let (conversion, value) = converted(&pod("", "", limits), NOTHING);
        assert_eq!(quanta(&value), None, "{limits}");
        assert!(
            conversion.notes[0].contains("requests 0 GPUs"),
            "{:?}",
            conversion.notes
        );
    }
}

#[test]
fn several_gpus_become_a_sum_and_the_annotation() {
    let (_, value) = converted(
        &pod("", "", "nvidia.com/gpu: 2, nvidia.com/gpumem: 8000"),
        NOTHING,
    );
    assert_eq!(quanta(&value), Some(16));
    assert_eq!(value["metadata"]["annotations"]["bursar.dev/gpus"], "2");
}

#[test]
fn container_spread_for_another_one_is_noted() {
    let container = |name: &str, gpus: u32| {
        format!(
            "{{ name: {name}, resources: {{ limits: {{ nvidia.com/gpu: {gpus}, nvidia.com/gpumem: 8000 }} }} }}"
        )
    };
    let (large, small) = (container("large", 2), container("small", 1));
    let manifest =
        format!("kind: Pod\nmetadata: {{ name: a }}\nspec: {{ containers: [{large}, {small}] }}\n");
    let (conversion, value) = converted(&manifest, NOTHING);
    assert_eq!(value["metadata"]["annotations"]["bursar.dev/gpus"], "2");
    assert_eq!(conversion.notes.len(), 1, "{:?}", conversion.notes);
    assert!(
        conversion.notes[0].contains("container small: spread over 2 GPUs"),
        "{:?}",
        conversion.notes
    );
}

#[test]
fn scheduler_runtime_class_and_variables_are_taken_out() {
    let spec = "  schedulerName: hami-scheduler\n  runtimeClassName: nvidia\n  nodeSelector: { disk: ssd }\n";
    let (conversion, value) = converted(
        &pod(
            "hami.io/webhook: ignore",
            spec,
            "nvidia.com/gpu: 1, nvidia.com/gpumem: 4000",
        ),
        NOTHING,
    );
    assert!(
        value["spec"]["schedulerName"].is_null() && value["spec"]["runtimeClassName"].is_null()
    );
    assert_eq!(value["spec"]["nodeSelector"]["disk"], "ssd");
    assert!(value["metadata"]["annotations"].is_null());
    assert_eq!(conversion.notes.len(), 3, "{:?}", conversion.notes);
    let own = converted(
        &pod(
            "",
            "  schedulerName: my-scheduler\n",
            "nvidia.com/gpumem: 4000",
        ),
        NOTHING,
    )
    .1;
    assert_eq!(own["spec"]["schedulerName"], "my-scheduler");
}

#[test]
fn workloads_and_lists_are_rewritten_inside() {
    let template = "template:\n    metadata: { labels: { app: a } }\n    spec:\n      containers:\n        - name: a\n          resources:\n            \
        limits: { nvidia.com/gpu: 1, nvidia.com/gpumem: 2048 }\n            requests: { nvidia.com/gpu: 1, nvidia.com/gpumem: 2048 }\n";
    for kind in ["Deployment", "StatefulSet", "Job", "DaemonSet"] {
        let manifest =
            format!("kind: {kind}\nmetadata: {{ name: a }}\nspec:\n  replicas: 2\n  {template}");
        let (_, value) = converted(&manifest, NOTHING);
        assert_eq!(quanta(&value), Some(2), "{kind}");
        assert_eq!(value["spec"]["replicas"], 2);
        assert!(
            value["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"].is_null()
        );
    }
    let cron = "kind: CronJob\nmetadata: { name: a }\nspec:\n  schedule: \"@daily\"\n  jobTemplate:\n    spec:\n      template:\n        spec:\n          \
        containers: [{ name: a, resources: { limits: { nvidia.com/gpumem: 1024 } } }]\n";
    assert!(
        converted(cron, NOTHING)
            .0
            .yaml
            .contains("bursar.dev/gpu-memory-gib: 1")
    );
    let list = "kind: List\nitems:\n- { kind: Pod, metadata: { name: a }, spec: { containers: [{ name: a, resources: { limits: { nvidia.com/gpumem: 1024 } } }] } }\n";
    assert_eq!(quanta(&converted(list, NOTHING).1), Some(1));
}

#[test]
fn requests_of_kai_become_quanta() {
    let kai = "  schedulerName: kai-scheduler\n";
    for (annotations, limits, wanted, gpus) in [
        ("gpu-memory: \"4000\"", "", 4, None),
        ("gpu-memory: \"2000\"", "cpu: 1", 2, None),
        ("gpu-fraction: \"0.5\"", "", 40, None),
        ("gpu-fraction: 0.25", "", 20, None),
        (
            "gpu-fraction: \"0.5\", gpu-fraction-num-devices: \"2\"",
            "",
            80,
            Some("2"),
        ),
    ] {
        let (_, value) = converted(&pod(annotations, kai, limits), GIB80);
        assert_eq!(quanta(&value), Some(wanted), "{annotations}");
        assert_eq!(
            value["metadata"]["annotations"]["bursar.dev/gpus"].as_str(),
            gpus
        );
        assert!(value["metadata"]["annotations"]["gpu-memory"].is_null());
        assert!(value["spec"]["schedulerName"].is_null());
    }
}

#[test]
fn replicas_of_nvidias_plugin_become_parts_of_a_gpu() {
    for (limits, replicas, wanted, gpus) in [
        ("nvidia.com/gpu: 1", 4, 20, None),
        ("nvidia.com/gpu.shared: 1", 10, 8, None),
        ("nvidia.com/gpu: 2", 8, 20, None),
        ("nvidia.com/gpu: 1", 1, 80, None),
        ("nvidia.com/gpu: 2", 1, 160, Some("2")),
    ] {
        let assumptions = Assumptions {
            replicas: Some(replicas),
            ..GIB80
        };
        let (_, value) = converted(&pod("", "", limits), assumptions);
        assert_eq!(quanta(&value), Some(wanted), "{limits} of {replicas}");
        assert_eq!(
            value["metadata"]["annotations"]["bursar.dev/gpus"].as_str(),
            gpus
        );
    }
    let mps = "kind: Pod\nmetadata: { name: a }\nspec:\n  hostIPC: true\n  containers:\n  - name: a\n    env:\n    - { name: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, value: 0=4G }\n    \
        - { name: MODE, value: fast }\n    resources: { limits: { nvidia.com/gpu: 1 } }\n";
    let (_, value) = converted(mps, GIB80);
    let variables = value["spec"]["containers"][0]["env"].as_sequence().unwrap();
    assert_eq!((variables.len(), quanta(&value)), (1, Some(20)));
}

#[test]
fn configurations_of_the_plugin_are_left_out() {
    let sharing = "kind: ConfigMap\nmetadata: { name: time-slicing-config }\ndata:\n  any: |-\n    version: v1\n    sharing:\n      timeSlicing:\n        \
        resources: [{ name: nvidia.com/gpu, replicas: 4 }]\n---\nkind: RuntimeClass\nmetadata: { name: nvidia }\nhandler: nvidia\n";
    let converted = convert(sharing, NOTHING).unwrap();
    assert_eq!((converted.yaml.as_str(), converted.notes.len()), ("", 2));
    let other = "kind: ConfigMap\nmetadata:\n  name: other\ndata:\n  a: b\n";
    assert_eq!(convert(other, NOTHING).unwrap().yaml, other);
}

#[test]
fn quota_of_memory_becomes_a_budget() {
    let manifest = "kind: ResourceQuota\nmetadata: { name: q, namespace: ml }\nspec:\n  hard: { limits.nvidia.com/gpumem: 65536, limits.nvidia.com/gpu: 4, pods: 10 }\n";
    let converted = convert(manifest, NOTHING).unwrap();
    let documents: Vec<&str> = converted.yaml.split("---\n").collect();
    let quota: Value = serde_yaml_ng::from_str(documents[0]).unwrap();
    let budget: Value = serde_yaml_ng::from_str(documents[1]).unwrap();
    assert_eq!(quota["spec"]["hard"]["pods"], 10);
    assert_eq!(budget["kind"], "GpuMemoryBudget");
    assert_eq!(budget["metadata"]["namespace"], "ml");
    assert_eq!(budget["spec"]["deviceMemory"]["guaranteed"], "64Gi");
}

#[test]
fn fields_without_counterpart_are_refused_by_name() {
    for (manifest, name) in [
        (pod("", "", "nvidia.com/gpu: 1, nvidia.com/gpucores: 30"), "nvidia.com/gpucores"),
        (pod("", "", "nvidia.com/gpu: 1, nvidia.com/priority: 0"), "nvidia.com/priority"),
        (pod("", "", "nvidia.com/mig-1g.10gb: 1"), "nvidia.com/mig-1g.10gb"),
        (pod("nvidia.com/use-gputype: A100", "", "nvidia.com/gpumem: 1"), "nvidia.com/use-gputype"),
        (pod("nvidia.com/nouse-gputype: V100", "", "nvidia.com/gpumem: 1"), "nvidia.com/nouse-gputype"),
        (pod("nvidia.com/use-gpuuuid: GPU-1", "", "nvidia.com/gpumem: 1"), "nvidia.com/use-gpuuuid"),
        (pod("nvidia.com/vgpu-mode: mig", "", "nvidia.com/gpumem: 1"), "nvidia.com/vgpu-mode"),
        ("kind: ResourceQuota\nmetadata: { name: q }\nspec: { hard: { limits.nvidia.com/gpucores: 100 } }\n".to_owned(), "limits.nvidia.com/gpucores"),
    ] {
        let error = convert(&manifest, GIB80).unwrap_err();
        assert!(matches!(error, ConvertError::NoCounterpart { .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn shares_of_unknown_gpus_and_wrong_values_are_refused() {
    let share = convert(&pod("", "", "nvidia.com/gpu: 1"), NOTHING).unwrap_err();
    assert!(
        share.to_string().contains("--gpu-memory and --replicas"),
        "{share}"
    );
    let percentage =
        convert(&pod("", "", "nvidia.com/gpumem-percentage: 50"), NOTHING).unwrap_err();
    assert!(
        percentage.to_string().ends_with("--gpu-memory"),
        "{percentage}"
    );
    for wrong in [
        pod("gpu-fraction: \"1.5\"", "", ""),
        pod("gpu-fraction: half", "", ""),
        pod("gpu-memory: 4Gi", "", ""),
        pod("", "", "nvidia.com/gpumem: many"),
        pod("", "", "nvidia.com/gpumem-percentage: 150"),
    ] {
        assert!(
            matches!(convert(&wrong, GIB80), Err(ConvertError::Value { .. })),
            "{wrong}"
        );
    }
    assert!(matches!(
        convert("a: [", NOTHING),
        Err(ConvertError::Syntax(_))
    ));
}

#[test]
fn manifests_without_shared_gpus_stay_as_they_are() {
    for manifest in [
        "kind: Service\nmetadata:\n  name: a\nspec:\n  ports: []\n",
        "kind: Pod\nmetadata:\n  name: a\nspec:\n  containers:\n  - name: a\n    image: i\n",
        "kind: Pod\nmetadata:\n  name: a\n  annotations:\n    gpu-fraction-num-devices: '2'\nspec:\n  containers:\n  - name: a\n    image: i\n",
    ] {
        assert_eq!(convert(manifest, NOTHING).unwrap().yaml, manifest);
    }
    assert_eq!(
        convert("---\n---\n", NOTHING).unwrap(),
        Converted::default()
    );
}
