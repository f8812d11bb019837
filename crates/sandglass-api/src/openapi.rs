//! The document of the REST faces, and the plain list of all endpoints. Both are committed; a test keeps them true.

use std::fmt::Write as _;

use sandglass_engine::engine::Isolation;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Header, HeaderBuilder, Info, ObjectBuilder, OpenApi, RefOr, SecurityRequirement, Type,
};

use crate::e2b::unbuilt;
use crate::router::{ISOLATION, documented};

/// What opens the content of one volume.
const VOLUME_TOKEN: &str = "VolumeToken";

fn document() -> OpenApi {
    let (_, mut api) = documented().split_for_parts();
    let mut info = Info::new("Sandglass", env!("CARGO_PKG_VERSION"));
    info.description =
        Some("Disposable computers for AI agents: an E2B-compatible face and a native one.".into());
    api.info = info;
    let key = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key")));
    let bearer = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
    let components = api.components.get_or_insert_default();
    components.add_security_scheme("ApiKey", key);
    components.add_security_scheme("Bearer", bearer.clone());
    components.add_security_scheme(VOLUME_TOKEN, bearer);
    for item in api.paths.paths.values_mut() {
        let operations = [&mut item.delete, &mut item.get, &mut item.patch, &mut item.post, &mut item.put];
        for response in operations.into_iter().flatten().flat_map(|one| one.responses.responses.values_mut())
        {
            if let RefOr::T(response) = response {
                response.headers.insert(ISOLATION.as_str().to_owned(), RefOr::T(isolation()));
            }
        }
    }
    let none = Vec::<String>::new();
    api.security = Some(vec![
        SecurityRequirement::new("ApiKey", none.clone()),
        SecurityRequirement::new("Bearer", none),
    ]);
    api
}

/// The header that every answer has.
fn isolation() -> Header {
    let values =
        [Isolation::UserspaceKernel, Isolation::VirtualMachine, Isolation::None].map(Isolation::name);
    let schema = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(values));
    HeaderBuilder::new()
        .schema(Some(schema))
        .description(Some("what isolates the sandboxes of this server"))
        .build()
}

/// The OpenAPI document of what this version can do, as JSON.
#[must_use]
pub fn openapi_json() -> String {
    // The document is made of strings, numbers and maps, which always serialise.
    document().to_pretty_json().unwrap_or_default() + "\n"
}

/// One line per endpoint, sorted: method, path, who may call it (`key`, `token` of a volume, or `anyone`), and whether it works yet.
#[must_use]
pub fn endpoints() -> String {
    let mut lines = Vec::new();
    for (path, item) in document().paths.paths {
        let operations = [
            ("DELETE", item.delete),
            ("GET", item.get),
            ("PATCH", item.patch),
            ("POST", item.post),
            ("PUT", item.put),
        ];
        for (method, operation) in operations {
            if let Some(operation) = operation {
                let with_token = SecurityRequirement::new(VOLUME_TOKEN, Vec::<String>::new());
                let who = match operation.security {
                    None => "key",
                    Some(security) if security.contains(&with_token) => "token",
                    Some(_) => "anyone",
                };
                lines.push(format!("{path} {method} {who} built"));
            }
        }
    }
    lines.extend(unbuilt::ENDPOINTS.iter().map(|(method, path, _)| format!("{path} {method} key unbuilt")));
    lines.sort();
    lines.iter().fold(String::new(), |mut text, line| {
        // Writing to a string can't fail.
        let _ = writeln!(text, "{line}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Compares with the committed file, or writes it when `SANDGLASS_BLESS` is set.
    fn committed(name: &str, now: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../openapi").join(name);
        if std::env::var_os("SANDGLASS_BLESS").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, now).unwrap();
        }
        let then = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            then == now,
            "openapi/{name} is not what the code says: run `SANDGLASS_BLESS=1 cargo test -p sandglass-api openapi` \
             and review the difference"
        );
    }

    #[test]
    fn the_committed_files_are_true() {
        committed("sandglass.json", &openapi_json());
        committed("endpoints.txt", &endpoints());
    }

    /// Generated clients have a function for each.
    #[test]
    fn every_operation_has_a_name_of_its_own() {
        let document = serde_json::to_value(document()).unwrap();
        let items = document["paths"].as_object().unwrap().values();
        let operations = items.flat_map(|item| item.as_object().unwrap().values());
        let mut names: Vec<_> =
            operations.filter_map(|one| one["operationId"].as_str().map(str::to_owned)).collect();
        assert!(names.len() > 50, "{}", names.len());
        names.sort();
        let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }

    #[test]
    fn only_health_is_open() {
        let open: Vec<String> =
            endpoints().lines().filter(|line| line.contains(" anyone ")).map(str::to_owned).collect();
        assert_eq!(open, ["/health GET anyone built"]);
    }
}
