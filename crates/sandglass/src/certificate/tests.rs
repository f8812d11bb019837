use super::*;

#[test]
fn no_certificate_is_for_what_is_below_a_single_label() {
    assert!(["boxes.test", "a.b.c"].into_iter().all(has_names_below));
    assert!(!["localhost", "127.0.0.1", "a.1"].into_iter().any(has_names_below));
}

#[test]
fn the_files_of_an_operator_are_read_with_bounds() {
    let data = tempfile::tempdir().unwrap();
    let large = data.path().join("large");
    std::fs::File::create(&large).unwrap().set_len(MAX_FILE + 1).unwrap();
    assert!(contents(&large).unwrap_err().to_string().contains("larger"));
    std::fs::File::create(&large).unwrap().set_len(MAX_FILE).unwrap();
    contents(&large).unwrap();
}
