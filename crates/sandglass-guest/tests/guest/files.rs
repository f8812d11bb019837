//! Files, access and the plain endpoints, natively.

use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;

use crate::api::http;
use crate::native::Native;

const OCTETS: &str = "Content-Type: application/octet-stream\r\n";

fn target(path: &Path) -> String {
    format!("/files?path={}", path.display())
}

#[test]
fn contents_travel_both_ways_whole_and_in_parts() {
    let agent = Native::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new/deep/file.bin");
    let contents: Vec<u8> =
        (0..5_000_001_u32).map(|i| i.to_le_bytes()[usize::try_from(i % 3).unwrap()]).collect();
    let reply = http(agent.api, "POST", &target(&path), OCTETS, &contents);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let wanted = format!(r#"[{{"path":"{}","name":"file.bin","type":"file"}}]"#, path.display());
    assert_eq!(reply.text(), wanted);
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o644);
    let reply = http(agent.api, "GET", &target(&path), "", b"");
    assert!(reply.status == 200 && reply.body == contents);
    assert!(reply.head.contains("content-disposition: inline; filename=\"file.bin\""), "{}", reply.head);
    let reply = http(agent.api, "GET", &target(&path), "Range: bytes=5-9\r\n", b"");
    assert_eq!((reply.status, reply.body.as_slice()), (206, &contents[5..10]));
    assert!(reply.head.contains("content-range: bytes 5-9/5000001"), "{}", reply.head);
    assert_eq!(http(agent.api, "GET", &target(&path), "Range: bytes=5000001-\r\n", b"").status, 416);
    // Of several ranges, all is sent, as RFC 9110 (14.2) allows.
    let all = http(agent.api, "GET", &target(&path), "Range: bytes=0-1,5-9\r\n", b"");
    assert_eq!((all.status, all.body.len()), (200, 5_000_001));
    assert!(!all.head.contains("content-range: bytes"), "{}", all.head);
    let refused = http(agent.api, "GET", &target(&path), "Accept-Encoding: gzip, identity;q=0\r\n", b"");
    assert_eq!(refused.status, 406);
    assert!(String::from_utf8_lossy(&refused.body).contains("identity"));
    assert_eq!(http(agent.api, "GET", &target(&path), "Accept-Encoding: gzip, deflate\r\n", b"").status, 200);
    for (condition, status) in [
        ("If-Modified-Since: Fri, 31 Dec 9999 23:59:59 GMT", 304),
        ("If-Modified-Since: Thu, 01 Jan 1970 00:00:00 GMT", 200),
        ("If-Modified-Since: yesterday", 200),
        ("If-Unmodified-Since: Thu, 01 Jan 1970 00:00:00 GMT", 412),
        ("If-Unmodified-Since: Fri, 31 Dec 9999 23:59:59 GMT", 200),
    ] {
        let reply = http(agent.api, "GET", &target(&path), &format!("{condition}\r\n"), b"");
        assert_eq!(reply.status, status, "{condition}");
    }
    // Shorter than before: nothing of the old contents stays.
    assert_eq!(http(agent.api, "POST", &target(&path), OCTETS, b"short").status, 200);
    assert_eq!(http(agent.api, "GET", &target(&path), "", b"").text(), "short");
    assert_eq!(http(agent.api, "POST", &target(&path), OCTETS, b"").status, 200);
    let reply = http(agent.api, "GET", &target(&path), "", b"");
    assert!(reply.status == 200 && reply.body.is_empty() && reply.head.contains("content-length: 0"));
}

#[test]
fn forms_carry_whole_paths_as_file_names() {
    let agent = Native::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let headers = "Content-Type: multipart/form-data; boundary=xx\r\n";
    let part = |field: &str, name: &str, body: &str| {
        format!(
            "--xx\r\nContent-Disposition: form-data; name=\"{field}\"; filename=\"{name}\"\r\n\r\n{body}\r\n"
        )
    };
    let at = |name: &str| dir.path().join(name).display().to_string();
    let body = part("file", &at("a/one"), "1")
        + &part("other", &at("ignored"), "x")
        + &part("file", &at("two"), "2");
    let reply = http(agent.api, "POST", "/files", headers, (body + "--xx--\r\n").as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(std::fs::read_to_string(at("a/one")).unwrap(), "1");
    assert_eq!(std::fs::read_to_string(at("two")).unwrap(), "2");
    assert!(!dir.path().join("ignored").exists());
    let twice = part("file", &at("same"), "1") + &part("file", &at("x/../same"), "2") + "--xx--\r\n";
    assert_eq!(http(agent.api, "POST", "/files", headers, twice.as_bytes()).status, 400);
    let named = part("file", "whatever", "3") + "--xx--\r\n";
    assert_eq!(
        http(agent.api, "POST", &target(&dir.path().join("three")), headers, named.as_bytes()).status,
        200
    );
    assert_eq!(std::fs::read_to_string(at("three")).unwrap(), "3");
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let agent = Native::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o666),
        0,
    )
    .unwrap();
    symlink("/proc/self/root", dir.path().join("trap")).unwrap();
    for (path, status) in [
        (dir.path().to_path_buf(), 400),
        (fifo, 400),
        ("/dev/zero".into(), 400),
        (dir.path().join("none"), 404),
        (dir.path().join("trap/etc/passwd"), 403),
        ("/proc/self/fd/0".into(), 403),
    ] {
        let reply = http(agent.api, "GET", &target(&path), "", b"");
        assert_eq!(reply.status, status, "GET {}: {}", path.display(), reply.text());
        assert!(reply.text().starts_with(&format!("{{\"code\":{status},\"message\":\"")), "{}", reply.text());
        if status != 404 {
            let reply = http(agent.api, "POST", &target(&path), OCTETS, b"x");
            assert_eq!(reply.status, status, "POST {}: {}", path.display(), reply.text());
        }
    }
    assert_eq!(http(agent.api, "GET", "/files?path=/a%00b", "", b"").status, 400);
    assert_eq!(http(agent.api, "GET", &format!("/files?path=/{}", "x".repeat(256)), "", b"").status, 400);
    assert_eq!(http(agent.api, "GET", &format!("/files?path={}", "/x".repeat(2100)), "", b"").status, 400);
    assert_eq!(http(agent.api, "POST", "/files", OCTETS, b"x").status, 400);
    assert_eq!(
        http(agent.api, "POST", "/files?path=/tmp/x", "Content-Type: text/plain\r\n", b"x").status,
        400
    );
    assert_eq!(http(agent.api, "GET", "/files?path=/etc/passwd&username=stranger", "", b"").status, 401);
}

#[test]
fn the_kernel_s_own_files_are_not_written() {
    let agent = Native::start(&[]);
    for path in
        ["/proc/self/../1/mem", "/proc/1/comm", "/sys/kernel/uevent_helper", "/proc/sys/kernel/core_pattern"]
    {
        let reply = http(agent.api, "POST", &format!("/files?path={path}"), OCTETS, b"x");
        assert_eq!(reply.status, 403, "{path}: {}", reply.text());
    }
}

#[test]
fn files_of_proc_are_read_to_their_end() {
    let agent = Native::start(&[]);
    let reply = http(agent.api, "GET", "/files?path=/proc/version", "", b"");
    assert!(reply.status == 200 && reply.text().starts_with("Linux version"), "{reply:?}");
}

struct Mounted(tempfile::TempDir);

impl Mounted {
    fn tmpfs(options: &std::ffi::CStr) -> Self {
        let dir = tempfile::tempdir().unwrap();
        rustix::mount::mount("tmpfs", dir.path(), "tmpfs", rustix::mount::MountFlags::NODEV, options)
            .unwrap();
        Self(dir)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_is_507() {
    let agent = Native::start(&[]);
    let disk = Mounted::tmpfs(c"size=1m");
    let reply = http(agent.api, "POST", &target(&disk.0.path().join("big")), OCTETS, &vec![1; 3 << 20]);
    assert_eq!(reply.status, 507, "{}", reply.text());
}

#[test]
fn the_token_guards_everything_but_health() {
    let agent = Native::start(&["--token", "secret"]);
    let refused = r#"{"code":401,"message":"unauthorized access, please provide a valid access token or method signing if supported"}"#;
    let json = "Content-Type: application/json\r\n";
    for headers in ["", "X-Access-Token: wrong\r\n"] {
        for (method, path) in [("POST", "/process.Process/List"), ("GET", "/envs"), ("GET", "/metrics")] {
            let reply = http(agent.api, method, path, &format!("{json}{headers}"), b"{}");
            assert_eq!((reply.status, reply.text()), (401, refused), "{path}");
        }
    }
    assert_eq!(http(agent.api, "GET", "/health", "", b"").status, 204);
    let allowed = format!("{json}X-Access-Token: secret\r\n");
    assert_eq!(http(agent.api, "POST", "/process.Process/List", &allowed, b"{}").text(), "{}");
    let reply = http(agent.api, "GET", "/files?path=/etc/passwd", "", b"");
    assert_eq!(
        (reply.status, reply.text()),
        (401, r#"{"code":401,"message":"missing signature query parameter"}"#)
    );
    assert_eq!(
        http(agent.api, "GET", "/files?path=/etc/passwd", "X-Access-Token: secret\r\n", b"").status,
        200
    );
    // base64(sha256("/etc/passwd:read::secret:1")), as E2B's client computes it.
    let signature = "v1_nMfvEdvDdOs0Zh99piP3dx7EzlPIZ9rodmKwR5Kdckg".replace('+', "%2B").replace('/', "%2F");
    let path = format!("/files?path=/etc/passwd&signature={signature}&signature_expiration=1");
    let reply = http(agent.api, "GET", &path, "", b"");
    assert_eq!(
        (reply.status, reply.text()),
        (401, r#"{"code":401,"message":"signature is already expired"}"#)
    );
}

#[test]
fn browsers_may_call_from_anywhere() {
    let agent = Native::start(&["--token", "secret"]);
    let headers = "Origin: https://a.example\r\nAccess-Control-Request-Method: POST\r\n\
                   Access-Control-Request-Headers: authorization, x-access-token\r\n";
    let reply = http(agent.api, "OPTIONS", "/process.Process/Start", headers, b"");
    assert_eq!(reply.status, 204);
    for line in
        ["access-control-allow-origin: *", "access-control-allow-headers: authorization, x-access-token"]
    {
        assert!(reply.head.contains(line), "{}", reply.head);
    }
    let reply = http(agent.api, "GET", "/none", "Origin: https://a.example\r\n", b"");
    assert_eq!(reply.status, 404);
    assert!(reply.head.contains("access-control-allow-origin: *"), "{}", reply.head);
}

#[test]
fn idle_it_is_small() {
    let agent = Native::start(&[]);
    assert_eq!(http(agent.api, "GET", "/health", "", b"").status, 204);
    // Unoptimised builds of this test are larger than the one that is shipped.
    assert!(agent.rss_kib() <= 24 * 1024, "{} KiB", agent.rss_kib());
}
