//! JSON compared with a JSON schema, as far as the tree's schemas go: `type`, `const`, `enum`,
//! `minimum`, `properties`, `required`, `additionalProperties`, `items`, `oneOf` and `$ref`.

use crate::tree::TREE;
use serde_json::Value;
use std::path::Path;

/// The violations of the schema in `file` (a path from the top of the tree) by `value`: the place,
/// and the rule.
fn faults(file: &str, value: &Value) -> Vec<String> {
    let path = Path::new(TREE).join(file);
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut faults = Vec::new();
    check(&schema, &schema, value, "", &mut faults);
    faults
}

/// Fails unless `value` is as the schema in `file` requires.
#[track_caller]
pub fn fits(file: &str, value: &Value) {
    let faults = faults(file, value);
    assert!(faults.is_empty(), "{file}: {faults:#?}");
}

fn check(root: &Value, schema: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let target = root.pointer(name.strip_prefix('#').unwrap()).unwrap_or_else(|| panic!("{name}"));
        return check(root, target, value, at, faults);
    }
    for keyword in schema.as_object().unwrap().keys() {
        let known = ["$schema", "$defs", "title", "description", "type", "const", "enum", "minimum", "properties"];
        let more = ["required", "additionalProperties", "items", "oneOf"];
        assert!(known.iter().chain(&more).any(|known| known == keyword), "{keyword} is not understood here");
    }
    let mut fault = |why: String| faults.push(format!("{at}: {why}"));
    let is = match schema["type"].as_str() {
        None => true,
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("number") => value.is_number(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some(other) => panic!("type {other}"),
    };
    if !is {
        fault(format!("{value} is no {}", schema["type"]));
    }
    if schema.get("const").is_some_and(|only| only != value) {
        fault(format!("{value} is not {}", schema["const"]));
    }
    if schema.get("enum").is_some_and(|all| !all.as_array().unwrap().contains(value)) {
        fault(format!("{value} is none of {}", schema["enum"]));
    }
    if schema.get("minimum").is_some_and(|least| value.as_f64() < least.as_f64()) {
        fault(format!("{value} is below {}", schema["minimum"]));
    }
    if let Some(any) = schema.get("oneOf") {
        let tried: Vec<Vec<String>> = (any.as_array().unwrap().iter())
            .map(|one| {
                let mut faults = Vec::new();
                check(root, one, value, at, &mut faults);
                faults
            })
            .collect();
        if tried.iter().filter(|faults| faults.is_empty()).count() != 1 {
            faults.extend(tried.into_iter().min_by_key(Vec::len).unwrap());
        }
        return;
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        if value.get(name.as_str().unwrap()).is_none() {
            faults.push(format!("{at}: no {name}"));
        }
    }
    for (name, member) in value.as_object().into_iter().flatten() {
        let at = format!("{at}/{name}");
        match (schema["properties"].get(name), schema.get("additionalProperties")) {
            (Some(schema), _) => check(root, schema, member, &at, faults),
            (None, Some(Value::Bool(false))) => faults.push(format!("{at}: the schema does not have it")),
            (None, Some(schema)) => check(root, schema, member, &at, faults),
            (None, None) => {}
        }
    }
    if let Some(schema) = schema.get("items") {
        for (n, item) in value.as_array().into_iter().flatten().enumerate() {
            check(root, schema, item, &format!("{at}/{n}"), faults);
        }
    }
}
