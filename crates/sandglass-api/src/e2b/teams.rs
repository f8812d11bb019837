//! The team of a key, and what it had.

use axum::extract::{FromRequestParts, Path, RawQuery, State};
use http::request::Parts;
use sandglass_store::TeamSample;
use sandglass_types::{Clock as _, SystemClock, TeamId, Timestamp};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::metrics::window;
use super::wire::rfc3339;
use crate::auth::{Caller, Presented, own_team};
use crate::error::{ApiError, ErrorBody};
use crate::query::Query;
use crate::router::ApiState;

pub(crate) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_teams))
        .routes(routes!(team_metrics))
        .routes(routes!(max_team_metrics))
}

/// The team that a path names, which is the caller's own.
#[derive(Debug)]
struct Own(TeamId);

impl FromRequestParts<ApiState> for Own {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        let Caller(team) = Caller::from_request_parts(parts, state).await?;
        let bad = |_| ApiError::invalid("Invalid team ID");
        let Path(text) = Path::<String>::from_request_parts(parts, state).await.map_err(bad)?;
        own_team(team, &text)?;
        Ok(Self(team))
    }
}

/// A team, as its own key sees it.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Team {
    #[serde(rename = "teamID")]
    team_id: String,
    name: String,
    /// The key that was sent along; no other is known.
    api_key: String,
    /// Always true: a key is of one team.
    is_default: bool,
}

#[utoipa::path(get, path = "/teams", tag = "e2b", responses(
    (status = 200, description = "The team of the key, which may come as a bearer token", body = Vec<Team>),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn list_teams(
    State(state): State<ApiState>,
    Presented { team, secret }: Presented,
) -> Result<axum::Json<Vec<Team>>, ApiError> {
    let team = state.backend.team(team).await?;
    let own = Team { team_id: team.id.to_string(), name: team.name, api_key: secret, is_default: true };
    Ok(axum::Json(vec![own]))
}

/// What a team had at one time.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TeamMetric {
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    timestamp: Timestamp,
    /// The same, in whole seconds since 1970.
    timestamp_unix: i64,
    /// Sandboxes that were not paused.
    concurrent_sandboxes: u32,
    /// How many were made in a second, since the sample before.
    sandbox_start_rate: f32,
}

/// How many a second. Pure.
#[expect(clippy::cast_possible_truncation, reason = "that is as exact as a rate needs to be")]
fn rate(sample: &TeamSample) -> f32 {
    (f64::from(sample.made) / sample.span.as_secs_f64()) as f32
}

impl From<&TeamSample> for TeamMetric {
    fn from(sample: &TeamSample) -> Self {
        Self {
            timestamp: sample.at,
            timestamp_unix: sample.at.as_millis().div_euclid(1000),
            concurrent_sandboxes: sample.concurrent,
            sandbox_start_rate: rate(sample),
        }
    }
}

#[utoipa::path(get, path = "/teams/{id}/metrics", tag = "e2b", params(("id" = String, Path),
    ("start" = Option<i64>, Query, description = "Seconds since 1970; the first sample if absent"),
    ("end" = Option<i64>, Query, description = "Seconds since 1970, that second included; now if absent")),
    responses(
    (status = 200, description = "What the key's own team had, every minute in the last day, oldest first; minutes in which \
     it had nothing may be missing", body = [TeamMetric]),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn team_metrics(
    State(state): State<ApiState>,
    Own(team): Own,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<Vec<TeamMetric>>, ApiError> {
    let (from, to) = window(&Query::parse(query.as_deref())?)?;
    let samples = state.backend.team_samples(team, from, to).await?;
    Ok(axum::Json(samples.iter().map(Into::into).collect()))
}

/// The most that a team had.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct MaxTeamMetric {
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    timestamp: Timestamp,
    /// The same, in whole seconds since 1970.
    timestamp_unix: i64,
    value: f32,
}

/// Which number of a sample.
fn number(metric: Option<&str>) -> Result<fn(&TeamSample) -> f32, ApiError> {
    #[expect(clippy::cast_precision_loss, reason = "no machine has sixteen million sandboxes")]
    fn concurrent(sample: &TeamSample) -> f32 {
        sample.concurrent as f32
    }
    match metric {
        Some("concurrent_sandboxes") => Ok(concurrent),
        Some("sandbox_start_rate") => Ok(rate),
        _ => Err(ApiError::invalid("metric must be concurrent_sandboxes or sandbox_start_rate")),
    }
}

/// The most of all samples, and when that was first; nothing at `otherwise` if there are none. Pure.
fn most(samples: &[TeamSample], number: fn(&TeamSample) -> f32, otherwise: Timestamp) -> MaxTeamMetric {
    let (timestamp, value) = samples.iter().fold((otherwise, 0.0), |most, sample| {
        if number(sample) > most.1 { (sample.at, number(sample)) } else { most }
    });
    MaxTeamMetric { timestamp, timestamp_unix: timestamp.as_millis().div_euclid(1000), value }
}

#[utoipa::path(get, path = "/teams/{id}/metrics/max", tag = "e2b", params(("id" = String, Path),
    ("metric" = String, Query, description = "concurrent_sandboxes or sandbox_start_rate"),
    ("start" = Option<i64>, Query, description = "Seconds since 1970; the first sample if absent"),
    ("end" = Option<i64>, Query, description = "Seconds since 1970, that second included; now if absent")),
    responses(
    (status = 200, description = "The most that the key's own team had, and when that was first; 0 if it had nothing",
     body = MaxTeamMetric),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn max_team_metrics(
    State(state): State<ApiState>,
    Own(team): Own,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<MaxTeamMetric>, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let number = number(query.one("metric"))?;
    let (from, to) = window(&query)?;
    let samples = state.backend.team_samples(team, from, to).await?;
    Ok(axum::Json(most(&samples, number, SystemClock.now())))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_most_of_a_window_and_when_it_was_first() {
        let at = Timestamp::from_millis;
        let sample = |millis, concurrent, made| TeamSample {
            at: at(millis),
            concurrent,
            made,
            span: Duration::from_secs(60),
        };
        let samples = [sample(1_000, 1, 90), sample(2_500, 7, 0), sample(3_000, 7, 30), sample(4_000, 0, 0)];
        let found = |metric| most(&samples, number(Some(metric)).unwrap(), at(9_000));
        let expected =
            |millis, unix, value| MaxTeamMetric { timestamp: at(millis), timestamp_unix: unix, value };
        assert_eq!(found("concurrent_sandboxes"), expected(2_500, 2, 7.0));
        assert_eq!(found("sandbox_start_rate"), expected(1_000, 1, 1.5));
        assert_eq!(most(&[], rate, at(9_000)), expected(9_000, 9, 0.0));
        for wrong in [None, Some("cpu"), Some("")] {
            assert!(number(wrong).is_err(), "{wrong:?}");
        }
    }
}
