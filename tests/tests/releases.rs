//! What a release is checked by: its signature and checksums, its bill of materials, and advisories that are ignored. Scripts of Python and tools
//! of ssh run where they are.
#![allow(clippy::disallowed_methods, reason = "reads files of the repository, not of a store")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn page(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap()
}

fn is_there(program: &str, argument: &str) -> bool {
    let there = Command::new(program).arg(argument).output().is_ok();
    if !there {
        eprintln!("NOT RUN: there is no {program}");
    }
    there
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

#[test]
fn each_advisory_that_is_ignored_is_in_security_md_and_no_other() {
    let ids = |text: &str| -> Vec<String> {
        let words = text.split(|sign: char| !sign.is_ascii_alphanumeric() && sign != '-');
        words.filter(|word| word.starts_with("RUSTSEC-")).map(str::to_owned).collect()
    };
    let (ignored, told) = (ids(&page("deny.toml")), ids(&page("SECURITY.md")));
    assert!(!ignored.is_empty() && ignored == told, "deny.toml: {ignored:?}; SECURITY.md: {told:?}");
}

/// As cargo reads requirements of versions.
#[test]
fn versions_are_compared_with_advisories_as_cargo_does() {
    if !is_there("python3", "--version") {
        return;
    }
    let cases = "
import advisories as a
for wanted, version, holds in [
    ('>= 1.2.3', '1.2.3', True), ('>= 1.2.3', '1.2.2', False), ('>= 1.10.0', '1.9.0', False), ('< 3.2.0', '3.2.0', False),
    ('> 0.4', '0.4.0', False), ('>= 0.4.1, < 0.5', '0.4.9', True), ('>= 0.4.1, < 0.5', '0.5.0', False), ('^1.2', '1.9.0', True),
    ('^1.2', '2.0.0', False), ('^0.2.3', '0.2.9', True), ('^0.2.3', '0.3.0', False), ('^0.0.3', '0.0.4', False), ('1.2', '1.4.0', True),
    ('~1.2.3', '1.2.9', True), ('~1.2.3', '1.3.0', False), ('= 1.0.0', '1.0.0', True), ('>= 1.0.0', '1.0.0-alpha.2', False),
    ('>= 1.0.0-alpha.1', '1.0.0-alpha.2', True), ('>= 1.0.0-alpha.10', '1.0.0-alpha.9', False), ('>= 1.0.0', '1.0.0+build', True),
]:
    assert a.holds(wanted, version) is holds, (wanted, version)
";
    let output = Command::new("python3")
        .args(["-B", "-c", cases])
        .current_dir(root().join("scripts/release.d"))
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn the_bill_of_materials_has_each_crate_of_the_program_with_its_digest_and_is_the_same_twice() {
    if !is_there("python3", "--version") {
        return;
    }
    let bill = || {
        let mut command = Command::new("python3");
        command.args(["-B", "scripts/release.d/sbom.py", "x86_64-unknown-linux-gnu"]).current_dir(root());
        let output = command.env("SOURCE_DATE_EPOCH", "1700000000").output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        output.stdout
    };
    let first = bill();
    assert_eq!(first, bill());
    let told: Value = serde_json::from_slice(&first).unwrap();
    assert_eq!((&told["bomFormat"], &told["specVersion"]), (&"CycloneDX".into(), &"1.6".into()));
    assert_eq!(told["metadata"]["timestamp"], "2023-11-14T22:13:20Z");
    let components = told["components"].as_array().unwrap();
    let named = |name: &str| components.iter().any(|one| one["name"] == name);
    assert!(["tokio", "ring", "kvarts-store", "rustls", "kvarts-bench"].into_iter().all(named));
    assert!(
        !["proptest", "kvarts-tests", "windows-sys"].into_iter().any(named),
        "what no program for Linux has"
    );
    for one in components {
        let name = one["name"].as_str().unwrap();
        let digest = one["hashes"][0]["content"].as_str().unwrap_or_default();
        assert!(digest.len() == 64 || name.starts_with("kvarts-"), "{one}");
        assert!(one["licenses"][0]["expression"].is_string(), "{one}");
    }
    let known: BTreeSet<&str> = components.iter().map(|one| one["bom-ref"].as_str().unwrap()).collect();
    assert_eq!(known.len(), components.len());
    for one in told["dependencies"].as_array().unwrap() {
        assert!(
            one["dependsOn"].as_array().unwrap().iter().all(|to| known.contains(to.as_str().unwrap())),
            "{one}"
        );
    }
}

/// With a key of its own: what is signed is found good, and what was changed, added or signed by another is not.
#[test]
fn a_release_that_was_changed_is_found_out() {
    if !is_there("ssh-keygen", "-?") {
        return;
    }
    let folder = std::env::temp_dir().join(format!("kvarts-release-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let release = folder.join("release");
    std::fs::create_dir_all(&release).unwrap();
    std::fs::write(release.join("kvarts-0.1.0.tar.gz"), "of the release").unwrap();
    let run = |line: &str| {
        let output = Command::new("bash").args(["-ec", line]).current_dir(&folder).output().unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output));
    };
    for key in ["own", "another"] {
        run(&format!(
            "ssh-keygen -q -t ed25519 -N '' -f {key} && echo \"release@kvarts $(ssh-keygen -y -f {key})\" > {key}.signers"
        ));
    }
    run(
        "cd release && sha256sum -- * > ../SHA256SUMS && mv ../SHA256SUMS . && ssh-keygen -q -Y sign -f ../own -n kvarts-release SHA256SUMS",
    );
    let verify = |signers: &str| {
        let mut command = Command::new(root().join("scripts/release"));
        command.args(["verify".as_ref(), release.as_os_str(), folder.join(signers).as_os_str()]);
        let output = command.output().unwrap();
        (output.status.success(), text(&output))
    };
    let (good, told) = verify("own.signers");
    assert!(good && told.contains("signature and checksums are good"), "{told}");
    assert!(!verify("another.signers").0, "signed by another");
    std::fs::write(release.join("more.whl"), "of another").unwrap();
    let (good, told) = verify("own.signers");
    assert!(!good && told.contains("more.whl is not in SHA256SUMS"), "{told}");
    std::fs::remove_file(release.join("more.whl")).unwrap();
    std::fs::write(release.join("kvarts-0.1.0.tar.gz"), "of the relEase").unwrap();
    assert!(!verify("own.signers").0, "a changed file");
    // Nor with checksums that suit it, since those are signed.
    run("cd release && sha256sum kvarts-0.1.0.tar.gz > SHA256SUMS");
    assert!(!verify("own.signers").0, "changed checksums");
    std::fs::remove_dir_all(&folder).unwrap();
}
