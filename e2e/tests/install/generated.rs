//! Holds the chart's values schema, README and annotations to `values.yaml` and to Kubernetes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use bursar_crds::context_policy::ContextAction;
use bursar_e2e::paths;
use serde_json::{Map, Value, json};

use crate::render::{chart, refusal, render};

const HOW: &str = "BURSAR_UPDATE=1 cargo test -p bursar-e2e --test install";
/// The marks around the generated part of the README.
const MARKS: (&str, &str) = ("<!-- values: begin -->\n", "<!-- values: end -->\n");
/// The maps that a release does not work without. `null` empties every other map.
const NEEDED_MAPS: [&str; 2] = ["securityContext", "podSecurityContext"];
/// The prefix of the definitions that Kubernetes publishes.
const OF_KUBERNETES: &str = "#/definitions/io.k8s.";

/// A value of the chart: its path, its default and its comment.
struct Documented {
    path: Vec<String>,
    default: Value,
    description: String,
}

/// Parses the comments of `values.yaml` that begin with `--`, as helm-docs does.
fn documented() -> Vec<Documented> {
    let text = fs::read_to_string(chart().join("values.yaml")).unwrap();
    let values: Value = serde_yaml_ng::from_str(&text).unwrap();
    let (mut path, mut comment, mut found) = (Vec::<(usize, String)>::new(), None, Vec::new());
    for line in text.lines() {
        let words = line.trim_start();
        let indent = line.len() - words.len();
        if let Some(words) = words.strip_prefix("# -- ") {
            comment = Some(words.to_owned());
        } else if let Some(words) = words.strip_prefix("# ") {
            comment = comment.map(|comment| format!("{comment} {words}"));
        } else if let Some((key, _)) = words.split_once(':').filter(|_| !words.starts_with('-')) {
            path.retain(|(outer, _)| *outer < indent);
            path.push((indent, key.to_owned()));
            if let Some(description) = comment.take() {
                let path: Vec<_> = path.iter().map(|(_, key)| key.clone()).collect();
                let default = path.iter().fold(&values, |value, key| &value[key]).clone();
                found.push(Documented {
                    path,
                    default,
                    description,
                });
            }
        } else {
            comment = None;
        }
    }
    found
}

/// Collects the paths of all values that are no maps, or empty ones.
fn leaves(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value.as_object().filter(|map| !map.is_empty()) {
        Some(map) => {
            for (key, value) in map {
                leaves(value, &format!("{path}.{key}"), found);
            }
        }
        None => drop(found.insert(path.trim_start_matches('.').to_owned())),
    }
}

/// Reads the definitions that the pinned Kubernetes publishes.
fn kubernetes_definitions() -> Map<String, Value> {
    let module = Command::new("go")
        .args(["mod", "download", "-json", "k8s.io/kubernetes"])
        .current_dir(paths::repository().join("e2e/kube/kubernetes"))
        .env("GOWORK", "off")
        .output()
        .unwrap();
    let module: Value = serde_json::from_slice(&module.stdout).unwrap();
    let folder = PathBuf::from(module["Dir"].as_str().unwrap());
    let file = folder.join("api/openapi-spec/swagger.json");
    let swagger: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    swagger["definitions"].as_object().unwrap().clone()
}

/// Adds the definitions of Kubernetes that `value` refers to, and those that they refer to.
fn collect_definitions(
    value: &Value,
    all: &Map<String, Value>,
    found: &mut BTreeMap<String, Value>,
) {
    let reference = value.get("$ref").and_then(Value::as_str);
    if let Some(name) = reference.filter(|name| name.starts_with(OF_KUBERNETES)) {
        let name = name.trim_start_matches("#/definitions/");
        if !found.contains_key(name) {
            let definition = all
                .get(name)
                .unwrap_or_else(|| panic!("Kubernetes has no {name}"));
            found.insert(name.to_owned(), strict(definition));
            collect_definitions(definition, all, found);
        }
    }
    let inner: Vec<&Value> = match value {
        Value::Object(map) => map.values().collect(),
        Value::Array(list) => list.iter().collect(),
        _ => Vec::new(),
    };
    for value in inner {
        collect_definitions(value, all, found);
    }
}

/// Returns a definition that refuses unknown fields, with the first sentence of each description.
fn strict(definition: &Value) -> Value {
    let mut definition = definition.clone();
    simplify(&mut definition);
    let is_quantity = definition["type"] == "string"
        && definition["description"]
            .as_str()
            .is_some_and(|text| text.starts_with("Quantity is"));
    if is_quantity {
        definition["type"] = json!(["string", "number"]);
    }
    if definition.get("properties").is_some() {
        definition["additionalProperties"] = json!(false);
    }
    definition
}

fn simplify(value: &mut Value) {
    if let Value::Array(list) = value {
        list.iter_mut().for_each(simplify);
    }
    let Value::Object(map) = value else { return };
    map.retain(|key, _| !key.starts_with("x-kubernetes-"));
    if map
        .get("format")
        .is_some_and(|format| format == "int-or-string")
    {
        map.insert("type".to_owned(), json!(["integer", "string"]));
    }
    if map.get("format").is_some_and(Value::is_string) {
        map.remove("format");
    }
    for (key, value) in map.iter_mut() {
        match value.as_str().filter(|_| key == "description") {
            Some(text) => {
                let line = text.lines().next().unwrap_or_default();
                let sentence = line.split_inclusive(". ").next().unwrap_or_default();
                *value = json!(sentence.trim());
            }
            None => simplify(value),
        }
    }
}

/// Returns the place of a value in the schema, past the references to the chart's definitions.
fn place_in(schema: &Value, path: &[String]) -> String {
    let mut place = String::new();
    for key in path {
        let at = schema.pointer(&place).unwrap();
        let reference = at.get("$ref").and_then(Value::as_str);
        let own = reference.filter(|name| !name.starts_with(OF_KUBERNETES));
        if let Some(own) = own {
            place = own.trim_start_matches('#').to_owned();
        }
        place = format!("{place}/properties/{key}");
        let found = schema.pointer(&place).is_some();
        assert!(found, "values.schema.json has no {}", path.join("."));
    }
    place
}

/// Requires a value in the schema: Helm deletes a value that is set to `null`, and the templates
/// would render nothing in its place.
fn require(schema: &mut Value, place: &str) {
    let (parent, key) = place.rsplit_once("/properties/").unwrap();
    let parent = schema.pointer_mut(parent).unwrap();
    let known = parent["required"].as_array().into_iter().flatten();
    let known = known.filter_map(Value::as_str).map(str::to_owned);
    let required: BTreeSet<String> = known.chain([key.to_owned()]).collect();
    parent["required"] = json!(required);
}

/// Returns the schema with the generated descriptions, requirements, actions and definitions.
fn generated_schema(mut schema: Value) -> Value {
    for Documented {
        path,
        description,
        default,
    } in documented()
    {
        let place = place_in(&schema, &path);
        schema.pointer_mut(&place).unwrap()["description"] = json!(description);
        // A parent chart may bring globals of its own in place of these.
        let is_needed = NEEDED_MAPS
            .iter()
            .any(|key| path.ends_with(&[(*key).to_owned()]));
        if path[0] != "global" && (is_needed || !default.is_object()) {
            require(&mut schema, &place);
        }
    }
    let action = "/properties/contextPolicy/properties/default/enum";
    *schema.pointer_mut(action).unwrap() = json!(ContextAction::DEFAULTS);
    let definitions = schema["definitions"].as_object_mut().unwrap();
    definitions.retain(|name, _| !name.starts_with("io.k8s."));
    let mut found = BTreeMap::new();
    collect_definitions(&schema, &kubernetes_definitions(), &mut found);
    schema["definitions"].as_object_mut().unwrap().extend(found);
    schema
}

#[test]
fn schema_has_comments_and_kubernetes_definitions() {
    let file = chart().join("values.schema.json");
    let schema: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let wanted = generated_schema(schema.clone());
    if std::env::var_os("BURSAR_UPDATE").is_some() {
        let text = serde_json::to_string_pretty(&wanted).unwrap();
        fs::write(&file, format!("{text}\n")).unwrap();
        return;
    }
    assert!(schema == wanted, "{} is stale: run `{HOW}`", file.display());
}

#[test]
fn schema_refuses_misspelt_fields_with_their_path() {
    for (value, path) in [
        (r#"agent.extraEnv=[{"nme":"x"}]"#, "extraEnv"),
        (
            r#"agent.tolerations=[{"operater":"Exists"}]"#,
            "tolerations",
        ),
        (r#"agent.resources={"limit":{"memory":"1Gi"}}"#, "resources"),
        (
            r#"agent.extraVolumes=[{"name":"a","hostpath":{}}]"#,
            "extraVolumes",
        ),
        (r#"operator.affinity={"nodeAfinity":{}}"#, "affinity"),
        (r#"agent.logLevel="dbug""#, "log"),
        (r#"operator.logLevel="info,kube""#, "log"),
        (r#"agent.gpuNodeLabels=["a b"]"#, "gpuNodeLabels"),
        (
            r#"policies.validationActions=["Deny","Warn"]"#,
            "validationActions",
        ),
        (r#"policies.validationActions=[]"#, "validationActions"),
        (r#"operator.replicas=-1"#, "replicas"),
        (r#"node.stateDir="var/lib""#, "stateDir"),
        (r#"node.runDir="run""#, "runDir"),
        (r#"unknown=1"#, "unknown"),
        (r#"node.runDir="/run/b\"x""#, "runDir"),
        (r#"policies.labelRestorers=["a'b"]"#, "labelRestorers"),
        (
            r#"commonLabels={"app.kubernetes.io/name":"x"}"#,
            "commonLabels",
        ),
        (
            r#"agent.podLabels={"app.kubernetes.io/instance":"x"}"#,
            "podLabels",
        ),
        (
            r#"networkPolicy.metricsPeers=[{"cidr":"::/0"}]"#,
            "metricsPeers",
        ),
        (r#"audit.hostPrograms=null"#, "hostPrograms"),
        (r#"gpuMemory.reservedPerGpu=null"#, "reservedPerGpu"),
        (r#"agent.securityContext=null"#, "securityContext"),
        (r#"agent.image.pullPolicy=null"#, "pullPolicy"),
        (
            r#"networkPolicy.monitoringNamespaces=null"#,
            "monitoringNamespaces",
        ),
    ] {
        let message = refusal(&[value]);
        assert!(message.contains(path), "{value}: {message}");
    }
    for value in [
        r#"agent.logLevel="info,kube=warn""#,
        r#"agent.resources={"limits":{"cpu":1,"memory":"1Gi"}}"#,
        r#"agent.extraEnv=[{"name":"A","valueFrom":{"fieldRef":{"fieldPath":"spec.nodeName"}}}]"#,
        r#"global={"imageRegistry":"host:5000/mirror","other":{"of":"a parent chart"}}"#,
        r#"policies.validationActions=["Warn","Audit"]"#,
        r#"policies.labelRestorers=["system:serviceaccount:velero:velero"]"#,
        r#"agent.podLabels={"app.kubernetes.io/part-of":"gpus"}"#,
        r#"agent.nodeSelector=null"#,
        r#"networkPolicy.monitoringNamespaces=[]"#,
    ] {
        render(&[value]);
    }
}

#[test]
fn operator_changes_one_field_of_a_pods_status() {
    let objects = render(&[]);
    let policy = objects.get("ValidatingAdmissionPolicy", "bursar-operator-pods");
    let rule = policy["spec"]["validations"][1]["expression"]
        .as_str()
        .unwrap();
    let status = &kubernetes_definitions()["io.k8s.api.core.v1.PodStatus"]["properties"];
    for field in status.as_object().unwrap().keys() {
        let kept = format!("object.status.?{field} == oldObject.status.?{field}");
        let is_kept = rule.split("&&").any(|part| part.trim() == kept);
        assert_eq!(is_kept, field != "nominatedNodeName", "{field}");
    }
}

#[test]
fn every_value_has_a_comment() {
    let values = fs::read_to_string(chart().join("values.yaml")).unwrap();
    let (mut all, documented) = (BTreeSet::new(), documented());
    leaves(&serde_yaml_ng::from_str(&values).unwrap(), "", &mut all);
    for Documented { path, .. } in &documented {
        let path = path.join(".");
        all.retain(|leaf| *leaf != path && !leaf.starts_with(&format!("{path}.")));
    }
    assert!(
        documented.len() > 80 && all.is_empty(),
        "no comment `# --` on {all:?}"
    );
}

#[test]
fn readme_has_the_table_of_values() {
    let file = chart().join("README.md");
    let page = fs::read_to_string(&file).unwrap();
    let mut table =
        "| Key | Type | Default | Description |\n|-----|------|---------|-------------|\n"
            .to_owned();
    for Documented {
        path,
        default,
        description,
    } in documented()
    {
        let kind = match &default {
            Value::Bool(_) => "bool",
            Value::Number(_) => "int",
            Value::Array(_) => "list",
            Value::Object(_) => "object",
            Value::String(_) | Value::Null => "string",
        };
        let key = path.join(".");
        table.push_str(&format!(
            "| {key} | {kind} | `{default}` | {description} |\n"
        ));
    }
    let (begin, end) = MARKS;
    let (head, rest) = page.split_once(begin).unwrap();
    let (_, tail) = rest.split_once(end).unwrap();
    let wanted = format!("{head}{begin}{table}{end}{tail}");
    if std::env::var_os("BURSAR_UPDATE").is_some() {
        fs::write(&file, &wanted).unwrap();
        return;
    }
    assert!(page == wanted, "{} is stale: run `{HOW}`", file.display());
}

#[test]
fn annotations_name_the_images_and_kinds() {
    let text = fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    let about: Value = serde_yaml_ng::from_str(&text).unwrap();
    let list = |name: &str| -> Vec<Value> {
        let text = about["annotations"][name].as_str().unwrap();
        serde_yaml_ng::from_str(text).unwrap()
    };
    let objects = render(&[]);
    let images: BTreeSet<_> = objects
        .pod_specs()
        .into_iter()
        .map(|spec| spec["containers"][0]["image"].as_str().unwrap().to_owned())
        .collect();
    let annotated = list("artifacthub.io/images").into_iter();
    let annotated: BTreeSet<_> = annotated
        .map(|image| format!("registry.example/{}", image["image"].as_str().unwrap()))
        .collect();
    assert_eq!(annotated, images);
    let kinds: BTreeSet<_> = objects
        .of_kind("CustomResourceDefinition")
        .map(|crd| {
            let spec = &crd["spec"];
            (
                crd["metadata"]["name"].clone().to_string(),
                spec["names"]["kind"].to_string(),
                spec["versions"][0]["name"].to_string(),
            )
        })
        .collect();
    let annotated = list("artifacthub.io/crds").into_iter();
    let annotated: BTreeSet<_> = annotated
        .map(|crd| {
            (
                crd["name"].to_string(),
                crd["kind"].to_string(),
                crd["version"].to_string(),
            )
        })
        .collect();
    assert_eq!(annotated, kinds);
}
