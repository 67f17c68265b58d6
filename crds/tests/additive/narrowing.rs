//! Finds what a CRD accepts no longer.

use std::cmp::Ordering;

use serde_json::Value;

/// The keywords that fix a field's form.
const FORM: &[&str] = &[
    "type",
    "format",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
];

/// The keywords that refuse values, whatever they say.
const RESTRICTIONS: &[&str] = &[
    "pattern",
    "multipleOf",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "uniqueItems",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
];

/// The keywords that accept more values where they are true.
const PERMISSIONS: &[&str] = &["nullable", "x-kubernetes-preserve-unknown-fields"];

/// The bounds, and which order of today's and the golden one is tighter.
const BOUNDS: &[(&str, Ordering)] = &[
    ("maximum", Ordering::Less),
    ("maxLength", Ordering::Less),
    ("maxItems", Ordering::Less),
    ("maxProperties", Ordering::Less),
    ("minimum", Ordering::Greater),
    ("minLength", Ordering::Greater),
    ("minItems", Ordering::Greater),
    ("minProperties", Ordering::Greater),
];

/// Returns what the CRD of today accepts no longer; both are the `spec` of a CRD.
pub(super) fn of_crd(golden: &Value, today: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for pointer in ["/group", "/scope", "/names/kind", "/names/plural"] {
        if golden.pointer(pointer) != today.pointer(pointer) {
            found.push(format!("{pointer} changed"));
        }
    }
    for version in entries(&golden["versions"]) {
        let name = &version["name"];
        let later = entries(&today["versions"]).find(|later| later["name"] == *name);
        let Some(later) = later.filter(|later| later["served"] == true) else {
            found.push(format!("version {name} is not served"));
            continue;
        };
        for subresource in version["subresources"].as_object().into_iter().flatten() {
            if later["subresources"].get(subresource.0).is_none() {
                found.push(format!("subresource {} is removed", subresource.0));
            }
        }
        let schema = |version: &Value| version["schema"]["openAPIV3Schema"].clone();
        of_schema("", &schema(version), &schema(later), &mut found);
    }
    found
}

fn entries(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Whether a keyword says something.
fn is_set(value: &Value) -> bool {
    !matches!(value, Value::Null | Value::Bool(false))
}

/// Adds what the schema of the field at `at` accepts no longer.
fn of_schema(at: &str, golden: &Value, today: &Value, found: &mut Vec<String>) {
    for keyword in FORM {
        if golden[keyword] != today[keyword] {
            found.push(format!("{at}: {keyword} changed"));
        }
    }
    for keyword in RESTRICTIONS {
        if is_set(&today[keyword]) && golden[keyword] != today[keyword] {
            found.push(format!("{at}: {keyword} is added or changed"));
        }
    }
    // A default that is gone or another changes what an object means that leaves the field out.
    if !golden["default"].is_null() && golden["default"] != today["default"] {
        found.push(format!("{at}: default changed"));
    }
    for keyword in PERMISSIONS {
        if is_set(&golden[keyword]) && !is_set(&today[keyword]) {
            found.push(format!("{at}: {keyword} is removed"));
        }
    }
    for (keyword, tighter) in BOUNDS {
        let bounds = [golden, today].map(|schema| schema[keyword].as_f64());
        let is_tighter = match bounds {
            [_, None] => false,
            [None, Some(_)] => true,
            [Some(golden), Some(today)] => today.partial_cmp(&golden) == Some(*tighter),
        };
        if is_tighter {
            found.push(format!("{at}: {keyword} is tightened"));
        }
    }
    for name in entries(&today["required"]) {
        if !entries(&golden["required"]).any(|known| known == name) {
            found.push(format!("{at}: {name} is required"));
        }
    }
    if is_set(&today["enum"]) {
        if !is_set(&golden["enum"]) {
            found.push(format!("{at}: enum is added"));
        }
        for value in entries(&golden["enum"]) {
            if !entries(&today["enum"]).any(|known| known == value) {
                found.push(format!("{at}: enum lacks {value}"));
            }
        }
    }
    for validation in entries(&today["x-kubernetes-validations"]) {
        let rule = &validation["rule"];
        let mut known = entries(&golden["x-kubernetes-validations"]);
        if !known.any(|known| known["rule"] == *rule) {
            found.push(format!("{at}: the rule {rule} is added"));
        }
    }
    for (name, field) in golden["properties"].as_object().into_iter().flatten() {
        let at = format!("{at}.{name}");
        match today["properties"].get(name) {
            Some(today) => of_schema(&at, field, today, found),
            None => found.push(format!("{at} is removed")),
        }
    }
    for (keyword, at) in [
        ("items", format!("{at}[]")),
        ("additionalProperties", format!("{at}.*")),
    ] {
        match (&golden[keyword], &today[keyword]) {
            (golden, today) if golden == today => {}
            (Value::Object(_), Value::Null) => found.push(format!("{at} is removed")),
            (golden, today) => of_schema(&at, golden, today, found),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn crd() -> Value {
        json!({
            "group": "bursar.dev", "scope": "Namespaced",
            "names": { "kind": "Budget", "plural": "budgets" },
            "versions": [{
                "name": "v1", "served": true, "subresources": { "status": {} },
                "schema": { "openAPIV3Schema": { "type": "object", "properties": { "spec": {
                    "type": "object",
                    "required": ["size"],
                    "x-kubernetes-validations": [{ "rule": "self.size > 0", "message": "a" }],
                    "properties": {
                        "size": { "type": "integer", "format": "int32", "minimum": 1, "maximum": 10,
                            "default": 5 },
                        "mode": { "type": "string", "enum": ["Open", "Closed"], "nullable": true },
                        "names": {
                            "type": "array", "maxItems": 4,
                            "items": { "type": "string", "maxLength": 63 },
                        },
                        "labels": {
                            "type": "object",
                            "additionalProperties": { "type": "string", "maxLength": 9 },
                        },
                    },
                } } } },
            }],
        })
    }

    const SPEC: &str = "/versions/0/schema/openAPIV3Schema/properties/spec";

    /// The findings after this value is written below [`SPEC`], or removed where there is none.
    fn found_after(below: &str, value: Option<Value>) -> Vec<String> {
        let mut today = crd();
        let (parent, name) = below.rsplit_once('/').unwrap();
        let parent = today.pointer_mut(&format!("{SPEC}{parent}")).unwrap();
        match value {
            Some(value) => parent[name] = value,
            None => drop(parent.as_object_mut().unwrap().remove(name).unwrap()),
        }
        of_crd(&crd(), &today)
    }

    #[test]
    fn each_narrowing_of_a_crd_is_found() {
        let narrowings = [
            ("/properties/mode", None, ".spec.mode is removed"),
            ("/properties/size/default", None, "default changed"),
            (
                "/properties/size/default",
                Some(json!(6)),
                "default changed",
            ),
            (
                "/properties/size/maximum",
                Some(json!(9)),
                "maximum is tightened",
            ),
            (
                "/properties/size/minimum",
                Some(json!(2)),
                "minimum is tightened",
            ),
            (
                "/properties/size/type",
                Some(json!("string")),
                "type changed",
            ),
            (
                "/properties/size/format",
                Some(json!("int64")),
                "format changed",
            ),
            (
                "/required",
                Some(json!(["size", "mode"])),
                "\"mode\" is required",
            ),
            (
                "/properties/names/minItems",
                Some(json!(1)),
                "minItems is tightened",
            ),
            (
                "/properties/names/items/maxLength",
                Some(json!(62)),
                "names[]: maxLength",
            ),
            (
                "/properties/names/items/pattern",
                Some(json!("a")),
                "pattern is added",
            ),
            (
                "/properties/names/items/enum",
                Some(json!(["a"])),
                "enum is added",
            ),
            ("/properties/names/items", None, "names[] is removed"),
            (
                "/properties/mode/enum",
                Some(json!(["Open"])),
                "enum lacks \"Closed\"",
            ),
            ("/properties/mode/nullable", None, "nullable is removed"),
            (
                "/properties/labels/additionalProperties",
                None,
                "labels.* is removed",
            ),
            (
                "/properties/labels/additionalProperties/maxLength",
                Some(json!(8)),
                "labels.*:",
            ),
            (
                "/x-kubernetes-validations",
                Some(json!([{ "rule": "false" }])),
                "rule",
            ),
        ];
        for (below, value, expected) in narrowings {
            let found = found_after(below, value);
            assert_eq!(found.len(), 1, "{below}: {found:?}");
            assert!(found[0].contains(expected), "{below}: {found:?}");
        }
    }

    #[test]
    fn removed_version_kind_or_subresource_of_a_crd_is_found() {
        for (pointer, value) in [
            ("/versions/0/served", json!(false)),
            ("/versions/0/name", json!("v2")),
            ("/versions/0/subresources", json!({})),
            ("/names/kind", json!("Other")),
            ("/scope", json!("Cluster")),
        ] {
            let mut today = crd();
            *today.pointer_mut(pointer).unwrap() = value;
            assert_eq!(of_crd(&crd(), &today).len(), 1, "{pointer}");
        }
    }

    #[test]
    fn additions_to_a_crd_are_no_narrowing() {
        let additions = [
            (
                "/properties/more",
                Some(json!({ "type": "string", "maxLength": 1 })),
            ),
            ("/properties/size/maximum", Some(json!(11))),
            ("/properties/size/maximum", None),
            ("/properties/size/minimum", Some(json!(0))),
            (
                "/properties/mode/enum",
                Some(json!(["Open", "Closed", "Later"])),
            ),
            ("/properties/mode/enum", None),
            ("/properties/mode/description", Some(json!("text"))),
            ("/properties/names/nullable", Some(json!(true))),
            ("/properties/names/default", Some(json!([]))),
            ("/required", Some(json!([]))),
            ("/x-kubernetes-validations/0/message", Some(json!("b"))),
            ("/x-kubernetes-validations", None),
        ];
        for (below, value) in additions {
            let found = found_after(below, value);
            assert_eq!(found, Vec::<String>::new(), "{below}");
        }
    }
}
