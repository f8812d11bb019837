//! What every implementation of [`Store`](crate::Store) must do, as cases that any of them can be put through.
//!
//! A backend calls [`store_conformance!`](crate::store_conformance) in its tests with an expression that makes a
//! fresh, empty store.
#![allow(clippy::unwrap_used, reason = "a case that fails panics")]

pub mod assignments;
pub mod audit;
pub mod bounds;
pub mod broker;
pub mod grants;
pub mod idempotency;
pub mod keys;
pub mod listing;
pub mod runs;
pub mod samples;
pub mod sandboxes;
pub mod snapshots;
pub mod spending;
pub mod team_samples;
pub mod teams;
pub mod volumes;

use std::collections::BTreeMap;
use std::time::Duration;

use sandglass_egress::policy::Policy;
use sandglass_types::budget::Amount;
use sandglass_types::{
    Digest, EndReason, Generation, KeyId, Lifetime, Limits, NodeId, SandboxId, SandboxState, TeamId,
    Timestamp,
};

use crate::{
    ApiKey, CommandDefaults, Created, ListFilter, MadeFrom, NewSandbox, Order, StartPath, Store, Transition,
};

/// Makes one test per case. `$fresh` is an async expression of a pair: the store, as `Arc<dyn Store>`, and whatever
/// must live as long as it.
#[macro_export]
macro_rules! store_conformance {
    ($fresh:expr) => {
        $crate::store_conformance!(@cases $fresh;
            teams: names_are_unique_and_ends_are_final;
            keys: keys_authenticate_until_they_or_their_team_end, use_is_written_when_it_is_asked_for,
                keys_of_nobody_are_refused, a_key_makes_others_until_it_ends, a_key_ends_and_renames_what_it_may, of_the_last_two_one_stays,
                a_stolen_key_is_remembered_while_anything_that_came_of_it_works, a_key_that_has_ended_changes_nothing,
                a_team_has_so_many_keys, ended_keys_do_not_pile_up,
                what_came_of_a_key_is_found_for_as_long_as_it_is_there;
            sandboxes: a_row_comes_back_as_it_was_stored, a_policy_is_replaced_while_the_sandbox_runs,
                which_way_it_comes_to_run_is_said_until_it_does, an_id_is_used_once, moves_compare_the_state,
                one_of_many_moves_wins, ends_move_only_while_running, long_details_are_cut,
                events_have_no_gaps, a_node_finds_its_own;
            snapshots: an_image_comes_back_as_it_was_stored, clients_find_what_is_ready_and_their_own,
                a_name_is_that_of_the_newest, pages_of_snapshots_are_stable, images_are_room_on_the_disk,
                snapshots_are_cold_that_nobody_has_used_since,
                children_of_a_fork_are_admitted_together_or_not_at_all,
                a_template_has_one_image_on_each_machine,
                a_name_is_a_template_s_or_a_snapshot_s;
            volumes: a_volume_comes_back_as_it_was_stored, a_team_that_was_revoked_has_no_content, a_name_is_that_of_one_volume_of_a_team,
                what_a_team_and_a_machine_may_have, a_volume_stays_while_somebody_needs_it,
                marks_are_kept_while_their_image_may_be_there;
            spending: what_is_set_aside_is_charged_once, an_overrun_is_not_the_budget_s, a_closed_budget_pays_for_nothing,
                an_overrun_does_not_come_again, no_overrun_is_too_much_to_be_written_down, a_team_that_is_gone_spends_nothing,
                what_nobody_answers_for_is_charged, a_revoked_team_spends_nothing, the_last_calls_are_told, a_team_spends_so_much_in_a_day_and_a_month,
                of_many_at_once_no_cent_is_spent_twice;
            grants: a_sandbox_spends_one_open_budget_of_its_team, a_budget_ends_with_the_last_who_may_spend_it,
                prices_are_kept_as_they_were;
            runs: a_run_goes_its_way_with_its_events, events_of_many_writers_have_no_gaps, a_request_makes_one_run,
                a_team_has_so_many_runs_under_way, a_run_is_cancelled_once, runs_are_listed_in_pages,
                artifacts_come_back_as_they_were, old_runs_are_forgotten_and_their_money_is_not;
            broker: the_first_mark_of_a_key_stays, a_secret_is_found_by_id_and_name_and_changes_its_value,
                secrets_of_a_team_are_bounded_and_its_own, pages_of_secrets_are_stable,
                a_connection_is_replaced_by_the_next_of_its_name, connections_of_a_team_are_bounded_and_its_own;
            assignments: a_user_has_one_at_a_time, of_many_at_once_one_is_assigned,
                a_release_ends_it_and_history_is_bounded;
            audit: rows_are_kept_in_their_order_until_they_are_old, long_reasons_are_cut;
            samples: a_window_of_one_sandbox, the_last_of_many_are_a_team_s_own, older_samples_are_thinned_out;
            team_samples: what_a_team_had_is_counted_until_it_has_nothing, old_ones_are_forgotten;
            idempotency: same_request_is_replayed, other_request_is_a_mismatch, keys_belong_to_one_team,
                a_failed_attempt_frees_the_key, old_keys_are_forgotten, one_of_many_requests_inserts;
            bounds: a_quota_is_filled_to_the_last_and_not_beyond, of_many_at_once_as_many_fit_as_fit,
                what_ends_makes_room, a_paused_sandbox_runs_again_where_there_is_room, the_machine_is_shared_by_all_teams_and_no_other_machine,
                a_repeated_request_is_answered_at_the_bound_too;
            listing: filters_apply_together, labels_are_any_text, limits_are_clamped, ties_are_ordered_by_id,
                pages_are_stable_while_sandboxes_come_and_go;
        );
    };
    (@cases $fresh:expr; $($module:ident: $($case:ident),+;)+) => {
        $(mod $module {
            use super::*;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let (store, guard) = $fresh.await;
                $crate::conformance::$module::$case(store).await;
                drop(guard);
            })+
        })+
    };
}

/// A moment, `millis` after an arbitrary start.
#[must_use]
pub fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(1_760_000_000_000 + millis)
}

/// A digest that is made of one byte.
#[must_use]
pub fn digest(byte: u8) -> Digest {
    Digest::from_bytes([byte; 32])
}

/// A key of `team` whose digest is `digest(byte)`.
#[must_use]
pub fn key_of(team: TeamId, byte: u8) -> ApiKey {
    ApiKey {
        id: KeyId::random(),
        team,
        name: format!("key {byte}"),
        digest: digest(byte),
        suffix: "beef".into(),
        operator: byte == 2,
        created_at: at(i64::from(byte)),
        last_used_at: None,
        revoked_at: None,
        made_by: None,
    }
}

/// A sandbox of `team`, created at `at(created)` and to be ended a minute later.
#[must_use]
pub fn sandbox_of(team: TeamId, created: i64) -> NewSandbox {
    NewSandbox {
        id: SandboxId::random(),
        node: NodeId::random(),
        team,
        template: "base".into(),
        rootfs: digest(7),
        limits: Limits::default(),
        access_token: None,
        metadata: BTreeMap::new(),
        env: BTreeMap::new(),
        allow_internet_access: None,
        policy: Policy::default(),
        traffic_token: None,
        request_host: None,
        lifetime: Lifetime::of(Duration::from_secs(60)),
        made_from: MadeFrom::Template,
        start_path: StartPath::Cold,
        defaults: None,
        generation: Generation::FIRST,
        created_at: at(created),
        end_at: at(created + 60_000),
        max_end_at: at(created + 3_600_000),
        idempotency: None,
        volumes: Vec::new(),
        models: None,
        connections: Vec::new(),
        assign_to: None,
        quota: Amount::UNBOUNDED,
        capacity: Amount::UNBOUNDED,
    }
}

/// Defaults of commands with odd texts in them.
#[must_use]
pub fn odd_defaults() -> CommandDefaults {
    let env = BTreeMap::from([("A".into(), "'\"\\ \u{1F600}\n".into())]);
    CommandDefaults { user: "zoe".into(), workdir: "/home/zo\u{eb}".into(), env }
}

/// A move without a reason.
#[must_use]
pub fn step(from: SandboxState, to: SandboxState, millis: i64) -> Transition {
    Transition {
        from,
        to,
        pause_mode: None,
        end_reason: None,
        at: at(millis),
        detail: format!("{from:?} to {to:?}"),
    }
}

/// A filter for the first hundred of a team in any state, newest first.
#[must_use]
pub fn all_of(team: TeamId) -> ListFilter {
    use SandboxState as S;
    ListFilter {
        team,
        states: vec![S::Creating, S::Running, S::Ending, S::Ended],
        metadata: BTreeMap::new(),
        template: None,
        created_from: None,
        order: Order::Descending,
        after: None,
        limit: 100,
    }
}

async fn team(store: &dyn Store) -> TeamId {
    store.create_team("acme", at(0)).await.unwrap().id
}

async fn insert(store: &dyn Store, new: &NewSandbox) -> SandboxId {
    assert_eq!(store.insert_sandbox(new).await.unwrap(), Created::Inserted);
    new.id.clone()
}

async fn run(store: &dyn Store, id: &SandboxId) {
    assert!(store.transition(id, &step(SandboxState::Creating, SandboxState::Running, 100)).await.unwrap());
}

async fn end(store: &dyn Store, id: &SandboxId, from: SandboxState, reason: EndReason) {
    let ending = Transition { end_reason: Some(reason), ..step(from, SandboxState::Ending, 200) };
    assert!(store.transition(id, &ending).await.unwrap());
    assert!(store.transition(id, &step(SandboxState::Ending, SandboxState::Ended, 300)).await.unwrap());
}
