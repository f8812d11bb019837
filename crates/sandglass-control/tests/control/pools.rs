//! Unused copies of a template's running state: each is handed out once, and none takes what somebody else needs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sandglass_engine::Engine as _;
use sandglass_store::{CommandDefaults, SandboxRow, StartPath, TemplateSpec};
use sandglass_types::budget::Amount;
use sandglass_types::{Error, ErrorKind, SandboxState};

use crate::fixture::{HOUR, Server, World, eventually, request, written};
use crate::scripted::Manner;
use crate::trouble::broken;

/// A world in which the template `web` has a pool.
fn world(size: u32) -> World {
    let mut world = World::scripted(Manner::Obedient);
    world.pools = HashMap::from([("web".to_owned(), size)]);
    world
}

/// Makes the template of a new sandbox, and ends that.
async fn keep(server: &Server) {
    let id = server.create().await;
    let spec = TemplateSpec {
        base: "base".into(),
        start: None,
        ready: None,
        ready_timeout: 60,
        pool: 0,
        agent: None,
        inherited: Vec::new(),
    };
    let defaults = CommandDefaults { user: "zoe".into(), workdir: "/srv".into(), env: BTreeMap::new() };
    server.control.keep_as_template(server.team, &id, "web", spec, defaults).await.unwrap();
    server.kill(&id).await;
}

async fn create(server: &Server) -> Result<SandboxRow, Error> {
    let request = sandglass_control::CreateSandbox { template: "web".into(), ..request(HOUR) };
    server.control.create(server.team, request).await
}

/// How many are ready.
async fn ready(server: &Server) -> u32 {
    let mut text = String::new();
    server.control.metrics(&mut text).await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("sandglass_pool_sandboxes "));
    line.unwrap().parse().unwrap()
}

async fn filled(server: &Server, size: u32) {
    eventually("the pool is full", async || (ready(server).await == size).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_is_handed_out_once_whoever_asks_at_the_same_time() {
    let world = world(8);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 8).await;
    let asking: Vec<_> = (0..16)
        .map(|_| {
            let (control, team) = (server.control.clone(), server.team);
            let request = sandglass_control::CreateSandbox { template: "web".into(), ..request(HOUR) };
            tokio::spawn(async move { control.create(team, request).await })
        })
        .collect();
    let mut rows = Vec::new();
    for asked in asking {
        rows.push(asked.await.unwrap().unwrap());
    }
    assert_eq!(rows.iter().map(|row| row.id.clone()).collect::<BTreeSet<_>>().len(), 16);
    let pooled = rows.iter().filter(|row| row.start_path == StartPath::Pool).count();
    assert!(pooled >= 8, "{pooled} of 8 were handed out");
    for row in &rows {
        assert_eq!(row.state, SandboxState::Running);
        // It was told who it is before: when it was made for nobody.
        let generation = if row.start_path == StartPath::Pool { 3 } else { 2 };
        assert_eq!(row.generation.0, generation);
        let said = format!("{} {generation} None\n", row.id);
        assert_eq!(written(&world.home(&row.id).join("identity")).await, said);
        assert!(
            world.kept(&row.id).is_some_and(|left| left > 1800),
            "it keeps the deadline of an unused one"
        );
    }
    for row in &rows {
        server.kill(&row.id).await;
    }
    server.stop().await;
    // An unused one is of no use to the next server.
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_not_fit_for_use_is_made_from_the_image_instead() {
    let world = world(1);
    let server = world.start().await.unwrap();
    keep(&server).await;
    for verb in ["set_deadline", "attach"] {
        filled(&server, 1).await;
        // The next one for the pool is made at the same time, and is not to be what fails.
        let (held, before) = (world.trouble.hold("restore"), world.trouble.calls(verb));
        world.trouble.fail(verb, [broken()]);
        let asked = create(&server);
        let failed = async {
            eventually("it fails", async || (world.trouble.calls(verb) > before).then_some(())).await;
            drop(held);
        };
        let (row, ()) = tokio::join!(asked, failed);
        let row = row.unwrap();
        assert_eq!((row.state, row.start_path), (SandboxState::Running, StartPath::Restore), "{verb}");
        let events = server.control.events(server.team, &row.id).await.unwrap();
        let said = events.iter().any(|event| event.detail.contains("could not be handed out"));
        assert!(said, "{events:?}");
        assert_eq!(written(&world.home(&row.id).join("identity")).await, format!("{} 3 None\n", row.id));
        server.kill(&row.id).await;
    }
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_nobody_gets_is_put_back() {
    let mut world = world(1);
    world.budgets.quota = Amount { sandboxes: 1, ..Amount::UNBOUNDED };
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 1).await;
    let (first, ready_one) = (server.create().await, world.engine().list().unwrap());
    assert_eq!(create(&server).await.unwrap_err().kind(), ErrorKind::Quota);
    assert_eq!(ready(&server).await, 1);
    server.kill(&first).await;
    let row = create(&server).await.unwrap();
    assert_eq!(row.start_path, StartPath::Pool);
    assert!(ready_one.iter().any(|(id, _)| *id == row.id), "it is the same");
    for id in server.in_state(SandboxState::Running).await {
        server.kill(&id).await;
    }
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn they_give_way_to_who_asks() {
    let mut world = world(2);
    world.budgets.capacity = Amount { memory_mib: 3 * 1024, ..Amount::UNBOUNDED };
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 2).await;
    let mut ids = Vec::new();
    for left in [2, 1, 0] {
        ids.push(server.create().await);
        eventually("they make room", async || (ready(&server).await == left).then_some(())).await;
    }
    let full = server.control.create(server.team, request(HOUR)).await.unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Capacity);
    for id in &ids {
        server.kill(id).await;
    }
    filled(&server, 2).await;
    server.stop().await;
    world.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_image_of_the_template_has_a_new_pool() {
    let world = world(1);
    let server = world.start().await.unwrap();
    keep(&server).await;
    filled(&server, 1).await;
    let before = world.engine().list().unwrap();
    keep(&server).await;
    eventually("it is another one", async || {
        let now = world.engine().list().unwrap();
        (ready(&server).await == 1 && now.len() == 1 && now != before).then_some(())
    })
    .await;
    server.stop().await;
    world.nothing_left().await;
}
