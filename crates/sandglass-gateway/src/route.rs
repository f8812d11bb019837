//! What a request asks for, by its method and path.

use http::Method;
use sandglass_models::Dialect;

/// What can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    /// A call.
    Call(Dialect),
    /// How long a call of Anthropic's would be.
    Count,
    /// Which models there are.
    List,
    /// One of them.
    Model(String),
}

/// What is asked for. What is not there is not there at once: clients try a WebSocket on `/v1/responses` for seconds where they hear
/// anything else.
pub(crate) fn route(method: &Method, path: &str) -> Option<Route> {
    if *method == Method::POST {
        return match path {
            "/v1/messages/count_tokens" => Some(Route::Count),
            path => Dialect::at(path).map(Route::Call),
        };
    }
    if *method == Method::GET {
        let rest = path.strip_prefix("/v1/models")?;
        return match rest.strip_prefix('/') {
            None if rest.is_empty() => Some(Route::List),
            Some(name) if !name.is_empty() => Some(Route::Model(name.to_owned())),
            _ => None,
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_found_and_nothing_else() {
        let post = |path| route(&Method::POST, path);
        for dialect in Dialect::ALL {
            assert_eq!(post(dialect.path()), Some(Route::Call(dialect)));
            assert_eq!(route(&Method::GET, dialect.path()), None, "a WebSocket begins so");
        }
        assert_eq!(post("/v1/messages/count_tokens"), Some(Route::Count));
        for path in
            ["/v1/messages/", "/v1/Messages", "//v1/messages", "/v1/messages/batches", "/v1/files", "/"]
        {
            assert_eq!(post(path), None, "{path}");
        }
        let get = |path| route(&Method::GET, path);
        assert_eq!(get("/v1/models"), Some(Route::List));
        assert_eq!(get("/v1/models/a/b"), Some(Route::Model("a/b".into())));
        for path in ["/v1/models/", "/v1/modelsx", "/v1", "/v1/responses/resp_1"] {
            assert_eq!(get(path), None, "{path}");
        }
        assert_eq!(route(&Method::DELETE, "/v1/models"), None);
    }
}
