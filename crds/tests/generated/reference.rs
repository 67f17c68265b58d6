//! Generates the API reference, `docs/use/reference/api.md`, from the schemas of the CRDs.

use std::fmt::Write as _;

use bursar_crds::{GpuMemoryBudget, GpuNamespace, GpuNode};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use kube::CustomResourceExt as _;

use super::{HOW, assert_current};

/// One field of a kind.
struct Row {
    /// The path as in `kubectl explain`, with `[]` for the entries of a list.
    path: String,
    /// The type, the values of an enum, and the default.
    shape: String,
    /// The description in one line.
    meaning: String,
}

/// The rows of all fields below this schema.
fn rows(schema: &JSONSchemaProps) -> Vec<Row> {
    let mut rows = Vec::new();
    add_rows("", schema, &mut rows);
    rows
}

/// Lists the fields below `schema`, whose path is `path`.
fn add_rows(path: &str, schema: &JSONSchemaProps, rows: &mut Vec<Row>) {
    for (name, field) in schema.properties.iter().flatten() {
        let is_required = schema.required.iter().flatten().any(|one| one == name);
        let path = format!("{path}{}{name}", if path.is_empty() { "" } else { "." });
        rows.push(Row {
            path: path.clone(),
            shape: shape(field, is_required),
            meaning: one_line(field),
        });
        match &field.items {
            Some(JSONSchemaPropsOrArray::Schema(entry)) => {
                add_rows(&format!("{path}[]"), entry, rows);
            }
            _ => add_rows(&path, field, rows),
        }
    }
}

/// The type of a field as the table shows it.
fn shape(field: &JSONSchemaProps, is_required: bool) -> String {
    let type_of = |schema: &JSONSchemaProps| match (&schema.format, &schema.type_) {
        (Some(format), Some(type_)) if type_ == "string" => format.clone(),
        (_, Some(type_)) => type_.clone(),
        (_, None) => "integer or string".to_owned(),
    };
    let mut text = match &field.items {
        Some(JSONSchemaPropsOrArray::Schema(entry)) => format!("list of {}", type_of(entry)),
        _ => type_of(field),
    };
    let values = field.enum_.iter().flatten();
    let values: Vec<String> = values
        .filter_map(|value| value.0.as_str().map(code))
        .collect();
    if !values.is_empty() {
        text = values.join(", ");
    }
    if let Some(most) = field.max_items {
        let _ = write!(text, ", at most {most}");
    }
    if is_required {
        text += ", required";
    }
    if let Some(default) = field.default.as_ref().filter(|one| !one.0.is_object()) {
        let default = default.0.to_string();
        let _ = write!(text, ", default {}", code(default.trim_matches('"')));
    }
    text
}

/// The description of a field without line breaks, as a cell of a table.
fn one_line(field: &JSONSchemaProps) -> String {
    let text = field.description.as_deref().unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").replace('|', "\\|")
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

/// The chapter of one kind: its names, the columns of `kubectl get`, its fields.
fn chapter(crd: &CustomResourceDefinition) -> String {
    let spec = &crd.spec;
    let mut text = format!("## {}\n\n", spec.names.kind);
    for version in &spec.versions {
        let schema = version
            .schema
            .as_ref()
            .and_then(|of| of.open_api_v3_schema.as_ref());
        let schema = schema.expect("every version has a schema");
        let _ = writeln!(text, "{}\n", one_line(schema));
        let names: Vec<String> = spec
            .names
            .short_names
            .iter()
            .flatten()
            .map(|one| code(one))
            .collect();
        let _ = writeln!(
            text,
            "`{}/{}`, {}, short name {}.\n",
            spec.group,
            version.name,
            spec.scope.to_lowercase(),
            names.join(", ")
        );
        text += "| column of `kubectl get` | field |\n|---|---|\n";
        for column in version.additional_printer_columns.iter().flatten() {
            let wide = if column.priority.unwrap_or(0) > 0 {
                " (`-o wide`)"
            } else {
                ""
            };
            let _ = writeln!(text, "| {}{wide} | `{}` |", column.name, column.json_path);
        }
        text += "\n| field | type | meaning |\n|---|---|---|\n";
        for Row {
            path,
            shape,
            meaning,
        } in rows(schema)
        {
            let _ = writeln!(text, "| `{path}` | {shape} | {meaning} |");
        }
        text.push('\n');
    }
    text
}

#[test]
fn api_reference_equals_the_types() {
    let page = format!(
        "<!-- Generated from crds/src by `{HOW}`. Do not edit. -->\n\n\
         # API\n\n\
         The fields of Bursar's kinds, as `kubectl explain` shows them. [The \
         runbooks](../runbooks.md) have\nthe conditions with their reasons, and \
         [README.md](README.md) what the API server refuses.\n\n{}{}{}",
        chapter(&GpuMemoryBudget::crd()),
        chapter(&GpuNode::crd()),
        chapter(&GpuNamespace::crd()),
    );
    assert_current(
        "docs/use/reference/api.md",
        &format!("{}\n", page.trim_end()),
    );
}

#[test]
fn descriptions_say_what_values_and_amounts_mean() {
    for crd in [GpuMemoryBudget::crd(), GpuNode::crd(), GpuNamespace::crd()] {
        let schema = crd.spec.versions[0].schema.as_ref();
        let schema = schema.and_then(|of| of.open_api_v3_schema.as_ref());
        let schema = schema.expect("every version has a schema");
        for Row {
            path,
            shape,
            meaning,
        } in rows(schema)
        {
            assert!(!meaning.is_empty(), "{path}");
            if path == "spec" {
                assert_ne!(meaning, one_line(schema), "it repeats the kind's");
            }
            if path.starts_with("spec.") && shape.starts_with("integer or string") {
                assert!(meaning.contains("Gi`"), "{path}: {meaning}");
            }
            // Kubernetes' own conventions say what the status of a condition is.
            let values = shape.split(", ").take_while(|word| word.starts_with('`'));
            for value in values.filter(|_| path != "status.conditions[].status") {
                assert!(meaning.contains(value), "{path} lacks {value}: {meaning}");
            }
        }
    }
}
