use super::*;

const A: &str = "aaaaaaaaaaaaaaaaaaaa";
const B: &str = "bbbbbbbbbbbbbbbbbbbb";

fn scope() -> Scope {
    Scope::new(Path::new("/srv/sg"), &"inst0001".parse().unwrap())
}

fn sandbox(id: &str) -> Claim {
    Claim::Sandbox(id.parse().unwrap())
}

fn process(pid: i32, parent: i32) -> Process {
    Process { pid, parent, name: "x".into(), cgroups: vec!["/".into()], ..Process::default() }
}

fn descriptor(number: i32, target: &str) -> Descriptor {
    Descriptor { number, target: target.into() }
}

#[test]
fn kernel_files_are_understood() {
    let stat = b"7 (a) (b\x1b) S 3 7 7 0 -1 4194560 1 2 3";
    assert_eq!(parse_stat(stat), Some(("a) (b\\u{1b}".into(), 3, false)));
    assert_eq!(parse_stat(b"7 (kthread) I 2 0 0 0 -1 69238880 0"), Some(("kthread".into(), 2, true)));
    assert_eq!(parse_stat(b"7 (x"), None);
    assert_eq!(parse_cgroups(b"4:memory:/a:b\n0::/c\n\n"), ["/a:b", "/c"]);
    assert_eq!(inode_of(OsStr::new("net:[4026531840]")), Some(4_026_531_840));
    assert_eq!(inode_of(OsStr::new("/net")), None);
    let info = b"pos:\t0\nflags:\t0200000\nlock:\t1: FLOCK  ADVISORY  WRITE 77 00:2f:5 0 EOF\n";
    assert!(holds_lock(info));
    assert_eq!(capabilities("CapPrm:", b"Name:\tx\nCapPrm:\t000001ff00000001\n"), Some(0x1ff_0000_0001));
    assert_eq!(capabilities("CapPrm:", b""), None);
    assert!(!holds_lock(b"pos:\t0\nlock:\t1: POSIX  ADVISORY  WRITE 77 00:2f:5 0 EOF\n"));
}

#[test]
fn a_process_is_claimed_by_group_folder_text_and_network() {
    let (mut group, mut folder, mut text, mut network) =
        (process(10, 1), process(11, 1), process(12, 1), process(13, 1));
    group.cgroups = vec!["/".into(), format!("/sandglass-inst0001/{A}")];
    folder.folders = vec!["/".into(), format!("/srv/sg/host/sandboxes/{A}/root").into()];
    text.arguments = format!("runsc\0--root=/srv/sg/host/runsc\0{A}\0").into();
    network.network = Some(7);
    let mut environment = process(14, 1);
    environment.environment = format!("HOME=/\0BUNDLE=/srv/sg/host/sandboxes/{B}\0").into();
    let stranger = process(15, 1);
    let processes = [group, folder, text, network, environment, stranger];
    let roles = roles(&scope(), &processes, &Pins::of(&[("inst0001-abcde", 7)]));
    assert!(!roles.server_runs());
    let expected = [
        (10, sandbox(A)),
        (11, sandbox(A)),
        (12, sandbox(A)),
        (13, Claim::Slot("inst0001-abcde".into())),
        (14, sandbox(B)),
    ];
    assert_eq!(roles.claims, BTreeMap::from(expected));
}

#[test]
fn the_server_is_who_holds_the_lock() {
    let program = Some((1, 2));
    let serve = Process { program, ..process(10, 1) };
    let host = Process { program, lock: true, ..process(11, 10) };
    let tool = Process { arguments: b"runsc\0--root=/srv/sg/host/runsc\0list\0".into(), ..process(12, 11) };
    let engine =
        Process { arguments: format!("runsc\0--root=/srv/sg/host/runsc\0{A}\0").into(), ..process(13, 11) };
    let thief = Process { lock: true, cgroups: vec![format!("/sandglass-inst0001/{B}")], ..process(14, 11) };
    let shell = Process { program: Some((1, 3)), ..process(1, 0) };
    let processes = [serve, host, tool, engine, thief, shell];
    let roles = roles(&scope(), &processes, &Pins::default());
    assert_eq!(roles.server, BTreeSet::from([10, 11, 12]));
    assert_eq!(roles.claims, BTreeMap::from([(13, sandbox(A)), (14, sandbox(B))]));
}

#[test]
fn descriptors_belong_to_what_they_open() {
    let path = |id: &str| format!("/srv/sg/host/sandboxes/{id}/disk.img");
    let mut server = Process { lock: true, ..process(10, 1) };
    server.descriptors = vec![
        descriptor(3, "/srv/sg"),
        descriptor(4, &path(A)),
        descriptor(5, "/srv/sg/host/runsc"),
        descriptor(6, "net:[7]"),
        descriptor(7, "/srv/sg/serve/store.db"),
    ];
    let mut sandboxed = Process { cgroups: vec![format!("/sandglass-inst0001/{B}")], ..process(11, 10) };
    sandboxed.descriptors = vec![descriptor(0, &path(B)), descriptor(1, &path(A)), descriptor(2, "net:[7]")];
    let mut stranger = process(12, 1);
    stranger.descriptors =
        vec![descriptor(0, "/dev/null"), descriptor(1, "/srv/sg/host/x"), descriptor(2, "net:[7]")];
    let processes = [server, sandboxed, stranger];
    let pins = Pins::of(&[("inst0001-abcde", 7)]);
    let roles = roles(&scope(), &processes, &pins);
    let found: Vec<_> = descriptors(&scope(), &processes, &roles, &pins)
        .into_iter()
        .map(|object| (object.name.split(':').next().unwrap_or_default().to_owned(), object.claim))
        .collect();
    let expected = [
        ("4 of process 10 (x)", sandbox(A)),
        ("0 of process 11 (x)", sandbox(B)),
        ("1 of process 11 (x)", sandbox(A)),
        ("2 of process 11 (x)", sandbox(B)),
        ("1 of process 12 (x)", Claim::Nobody),
        ("2 of process 12 (x)", Claim::Nobody),
    ];
    assert_eq!(found, expected.map(|(name, claim)| (name.to_owned(), claim)));
}

#[test]
fn a_watchdog_is_the_instance_s_and_no_server() {
    let named = |folder: &str| {
        format!("/usr/bin/sandglass\0watchdog\0--data-dir\0{folder}\0--cache-dir\0/c\0").into()
    };
    let own = Process { arguments: named("/srv/sg"), lock: true, ..process(10, 1) };
    let other = Process { arguments: named("/srv/sg2"), ..process(11, 1) };
    let mut held = own;
    held.descriptors = vec![descriptor(3, "/srv/sg"), descriptor(4, "/srv/sg/host/slots")];
    let processes = [held, other];
    let found = roles(&scope(), &processes, &Pins::default());
    assert!(!found.server_runs());
    assert_eq!(found.claims, BTreeMap::from([(10, Claim::Instance)]));
    let objects = descriptors(&scope(), &processes, &found, &Pins::default());
    assert!(
        objects.iter().all(|object| object.claim == Claim::Instance) && objects.len() == 2,
        "{objects:?}"
    );
    // While its host lives, it is a child of the server's.
    let host = Process { lock: true, ..process(9, 1) };
    let child = Process { arguments: named("/srv/sg"), ..process(10, 9) };
    assert_eq!(roles(&scope(), &[host, child], &Pins::default()).server, BTreeSet::from([9, 10]));
}
