//! An identity says everything, says it in one way only, and refuses to say less.

use super::*;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

pub(super) fn sample() -> Identity {
    Identity {
        model: "meta-llama/Llama-3.1-8B".into(),
        revision: "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b".into(),
        tokenizer: "sha256:79e3e522635f".into(),
        adapter: NONE.into(),
        kv_dtype: "bf16".into(),
        quantisation: Quantisation { recipe: NONE.into(), scales: NONE.into() },
        rope: "theta=500000 llama3 factor=8".into(),
        window: NONE.into(),
        arrangement: Arrangement { engine: "vllm".into(), layout: "NHD".into(), version: "1".into() },
        block_tokens: 256,
        spec_fingerprint: Fingerprint([7; 32]),
        tenant_salt: TenantSalt(vec![1, 2, 3]),
        extras: BTreeMap::from([("a".into(), "1".into()), ("b".into(), String::new())]),
    }
}

/// Every text field of an identity, by name: what a test breaks one at a time.
fn texts_mut(identity: &mut Identity) -> [(&'static str, &mut String, bool); 12] {
    [
        ("model", &mut identity.model, false),
        ("revision", &mut identity.revision, false),
        ("tokenizer", &mut identity.tokenizer, true),
        ("adapter", &mut identity.adapter, true),
        ("kv_dtype", &mut identity.kv_dtype, false),
        ("quantisation.recipe", &mut identity.quantisation.recipe, true),
        ("quantisation.scales", &mut identity.quantisation.scales, true),
        ("rope", &mut identity.rope, true),
        ("window", &mut identity.window, true),
        ("arrangement.engine", &mut identity.arrangement.engine, false),
        ("arrangement.layout", &mut identity.arrangement.layout, false),
        ("arrangement.version", &mut identity.arrangement.version, false),
    ]
}

fn text() -> impl Strategy<Value = String> {
    "[!-~\u{e0}-\u{17e}]{1,12}( [!-~]{1,4})?".prop_filter("none is not always allowed", |text| text != NONE)
}

fn identities() -> impl Strategy<Value = Identity> {
    let extras = btree_map(text(), ".{0,12}", 0..4);
    let rest = (1..=MAX_BLOCK_TOKENS, any::<[u8; 32]>(), vec(any::<u8>(), 0..=MAX_SALT_BYTES), extras);
    (vec(text(), 12), rest).prop_map(|(texts, (block_tokens, mut fingerprint, salt, extras))| {
        let mut identity = sample();
        for ((_, field, _), text) in texts_mut(&mut identity).into_iter().zip(texts) {
            *field = text;
        }
        fingerprint[0] |= 1;
        Identity {
            block_tokens,
            spec_fingerprint: Fingerprint(fingerprint),
            tenant_salt: TenantSalt(salt),
            extras,
            ..identity
        }
    })
}

proptest! {
    #[test]
    fn an_identity_survives_its_encoding(identity in identities()) {
        let bytes = identity.encode().unwrap();
        prop_assert_eq!(bytes.len(), identity.encoded_bytes());
        prop_assert_eq!(Identity::decode(&bytes), Ok(identity));
    }

    #[test]
    fn whatever_is_decoded_encodes_to_the_same_bytes(
        identity in identities(),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = identity.encode().unwrap();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(decoded) = Identity::decode(&bytes) {
            prop_assert_eq!(decoded.encode().unwrap(), bytes);
        }
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(tail in vec(any::<u8>(), 0..300)) {
        let bytes = [IDENTITY_DOMAIN.as_slice(), &tail].concat();
        if let Ok(decoded) = Identity::decode(&bytes) {
            prop_assert_eq!(decoded.encode().unwrap(), bytes);
        }
        prop_assert_eq!(Identity::decode(&tail), Err(IdentityError::Version));
    }

    #[test]
    fn an_identity_survives_json_and_toml(identity in identities()) {
        let json = serde_json::to_string(&identity).unwrap();
        prop_assert_eq!(Identity::from_json(&json), Ok(identity.clone()));
        let toml = toml::to_string(&identity).unwrap();
        prop_assert_eq!(Identity::from_toml(&toml), Ok(identity));
    }
}

#[test]
fn every_prefix_of_an_encoding_is_refused_and_so_is_a_byte_more() {
    let bytes = sample().encode().unwrap();
    for end in 0..bytes.len() {
        assert!(Identity::decode(&bytes[..end]).is_err(), "{end}");
    }
    assert_eq!(Identity::decode(&[bytes.as_slice(), &[0]].concat()), Err(IdentityError::Trailing));
}

#[test]
fn changing_any_one_field_changes_the_namespace() {
    let mut all = vec![sample()];
    for at in 0..12 {
        let mut changed = sample();
        let fields = texts_mut(&mut changed);
        fields[at].1.push('x');
        all.push(changed);
    }
    all.push(Identity { block_tokens: 128, ..sample() });
    all.push(Identity { spec_fingerprint: Fingerprint([8; 32]), ..sample() });
    all.push(Identity { tenant_salt: TenantSalt::default(), ..sample() });
    all.push(Identity { extras: BTreeMap::new(), ..sample() });
    let ids: std::collections::BTreeSet<_> =
        all.iter().map(|identity| identity.namespace_id().unwrap()).collect();
    assert_eq!(ids.len(), all.len());
}

#[test]
fn text_moved_from_one_field_to_its_neighbour_changes_the_namespace() {
    let one = Identity { model: "ab".into(), revision: "c".into(), ..sample() };
    let other = Identity { model: "a".into(), revision: "bc".into(), ..sample() };
    assert_ne!(one.namespace_id(), other.namespace_id());
}

#[test]
fn an_empty_mandatory_field_is_refused_by_name() {
    for at in 0..12 {
        let mut identity = sample();
        let (field, text, _) = &mut texts_mut(&mut identity)[at];
        let field = *field;
        text.clear();
        let error = identity.encode().unwrap_err();
        assert_eq!(error, IdentityError::Missing { field });
        assert!(error.to_string().contains(field));
        assert_eq!(identity.namespace_id(), Err(error));
    }
    let unset = Identity { spec_fingerprint: Fingerprint::default(), ..sample() };
    assert_eq!(unset.encode(), Err(IdentityError::Missing { field: "spec_fingerprint" }));
    for found in [0, MAX_BLOCK_TOKENS + 1, u32::MAX] {
        let unset = Identity { block_tokens: found, ..sample() };
        assert_eq!(unset.encode(), Err(IdentityError::BlockTokens { found }));
    }
}

#[test]
fn none_is_an_answer_for_an_adapter_but_not_for_a_revision() {
    for at in 0..12 {
        let mut identity = sample();
        let (field, text, may_be_none) = &mut texts_mut(&mut identity)[at];
        let expected = if *may_be_none { Ok(()) } else { Err(IdentityError::Unnamed { field }) };
        **text = NONE.into();
        assert_eq!(identity.validate(), expected);
    }
}

#[test]
fn untidy_and_oversized_fields_are_refused() {
    for text in [" x", "x ", "x\ny", "\u{7f}", "\0"] {
        let identity = Identity { model: text.into(), ..sample() };
        assert_eq!(identity.validate(), Err(IdentityError::Untidy { field: "model" }), "{text:?}");
    }
    let long = Identity { rope: "x".repeat(MAX_TEXT_BYTES + 1), ..sample() };
    assert_eq!(long.validate(), Err(IdentityError::TooLong { field: "rope", max: MAX_TEXT_BYTES }));
    let salty = Identity { tenant_salt: TenantSalt(vec![0; MAX_SALT_BYTES + 1]), ..sample() };
    assert_eq!(salty.validate(), Err(IdentityError::TooLong { field: "tenant_salt", max: MAX_SALT_BYTES }));
    let many = (0..=MAX_EXTRAS).map(|i| (format!("{i:03}"), String::new())).collect();
    let many = Identity { extras: many, ..sample() };
    assert_eq!(many.validate(), Err(IdentityError::TooLong { field: "extras", max: MAX_EXTRAS }));
    let large = (0..16).map(|i| (format!("{i}"), "x".repeat(MAX_EXTRA_VALUE_BYTES))).collect();
    assert_eq!(Identity { extras: large, ..sample() }.validate(), Err(IdentityError::TooLarge));
}

#[test]
fn extras_out_of_order_or_repeated_are_not_decoded() {
    let mut bytes = sample().encode().unwrap();
    let at = bytes.len() - 5; // the name "b", before the empty value's length
    assert_eq!(bytes[at], b'b');
    for name in [b'a', b'!'] {
        bytes[at] = name;
        assert_eq!(Identity::decode(&bytes), Err(IdentityError::ExtrasOrder));
    }
    let json = serde_json::to_string(&sample()).unwrap();
    let twice = json.replace(r#""b":"""#, r#""a":"""#);
    assert!(matches!(Identity::from_json(&twice), Err(IdentityError::File { .. })), "{twice}");
}

#[test]
fn a_huge_length_is_refused_without_being_believed() {
    let bytes = [IDENTITY_DOMAIN.as_slice(), &u32::MAX.to_le_bytes(), b"abc"].concat();
    assert_eq!(Identity::decode(&bytes), Err(IdentityError::Truncated { field: "model" }));
    assert_eq!(Identity::decode(&vec![0; MAX_IDENTITY_BYTES + 1]), Err(IdentityError::TooLarge));
}

#[test]
fn a_file_with_a_fault_names_the_line_and_the_field() {
    let toml = toml::to_string(&sample()).unwrap();
    let missing: String =
        toml.lines().filter(|line| !line.starts_with("revision")).map(|l| l.to_owned() + "\n").collect();
    assert!(Identity::from_toml(&missing).unwrap_err().to_string().contains("revision"));
    let empty = toml.replace("d04e592bb4f6aa9cfee91e2e20afa771667e1d4b", "");
    let line = toml.lines().position(|line| line.starts_with("revision")).map(|at| at + 1);
    let fields = vec![Lacking { field: "revision", line }];
    assert_eq!(Identity::from_toml(&empty), Err(IdentityError::Incomplete { fields }));
    let unknown = format!("modle = \"x\"\n{toml}");
    let error = Identity::from_toml(&unknown).unwrap_err();
    assert!(error.to_string().contains("modle"), "{error}");
    assert!(matches!(error, IdentityError::File { line: 1, .. }), "{error}");
    for bad in ["", "[", "{", "[]", "\u{0}", "model = 3"] {
        for error in [Identity::from_toml(bad).unwrap_err(), Identity::from_json(bad).unwrap_err()] {
            assert_eq!(error.to_string().lines().count(), 1, "{error}");
        }
    }
    let large = " ".repeat(MAX_IDENTITY_FILE_BYTES + 1);
    let expected = IdentityError::TooLong { field: "file", max: MAX_IDENTITY_FILE_BYTES };
    assert_eq!(Identity::from_toml(&large), Err(expected.clone()));
    assert_eq!(Identity::from_json(&large), Err(expected));
}

#[test]
fn kebab_case_names_are_read_too() {
    let json = serde_json::to_string(&sample()).unwrap();
    let kebab = ["kv_dtype", "block_tokens", "spec_fingerprint", "tenant_salt"]
        .iter()
        .fold(json.clone(), |json, name| json.replace(name, &name.replace('_', "-")));
    assert_ne!(kebab, json);
    assert_eq!(Identity::from_json(&kebab), Ok(sample()));
}

#[test]
fn a_salt_is_never_printed() {
    let mut identity = sample();
    identity.tenant_salt = TenantSalt(b"\xab\xcdsecret".to_vec());
    let printed = format!("{identity:?}");
    assert!(printed.contains("redacted, 8 bytes"), "{printed}");
    assert!(!printed.contains("secret") && !printed.contains("abcd") && !printed.contains("171, 205"));
    let bad = serde_json::to_string(&identity).unwrap().replace("abcd736563726574", "abcd73656372657");
    let error = Identity::from_json(&bad).unwrap_err().to_string();
    assert!(error.contains("tenant_salt") && !error.contains("abcd7365"), "{error}");
}

#[test]
fn all_that_a_file_lacks_is_told_at_once_with_its_lines_and_the_rest_has_defaults() {
    let text =
        "# of a model\nmodel = \"m\"\nrevision = \"\"\n[arrangement]\nengine = \"none\"\nlayout = \"l\"\n";
    let lacking = |field, line| Lacking { field, line };
    let fields = vec![
        lacking("revision", Some(3)),
        lacking("kv_dtype", None),
        lacking("arrangement.engine", Some(5)),
        lacking("arrangement.version", None),
        lacking("block_tokens", None),
    ];
    let error = Identity::from_toml(text).unwrap_err();
    assert_eq!(error, IdentityError::Incomplete { fields });
    let told = "identity: these fields are required and have no default: revision (line 3: empty, or \"none\"), kv_dtype (missing), arrangement.engine (line 5: empty, or \"none\"), arrangement.version (missing), block_tokens (missing)";
    assert_eq!(error.to_string(), told);
    let text = "model = \"m\"\nrevision = \"r\"\nkv-dtype = \"bf16\"\nblock-tokens = 16\n\
                [arrangement]\nengine = \"e\"\nlayout = \"l\"\nversion = \"1\"\n";
    let geometry = crate::Geometry::opaque(4096).unwrap();
    let least = Identity::new("m", "r", "bf16", Arrangement::new("e", "l", "1"), &geometry, 16);
    assert_eq!(IdentityForm::from_toml(text).unwrap().of(&geometry), Ok(least.clone()));
    assert!(Identity::from_toml(text).unwrap_err().to_string().contains("spec_fingerprint (missing)"));
    // A fingerprint that the file says is not replaced: it may say that the model given with it is another one.
    let said = toml::to_string(&least).unwrap();
    let other = crate::Geometry::opaque(8192).unwrap();
    assert_eq!(IdentityForm::from_toml(&said).unwrap().of(&other), Ok(least));
    let flat = "quantisation = \"none\"\n";
    let error = Identity::from_toml(flat).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("a table with recipe and scales"), "{error}");
}

#[test]
fn a_typo_is_told_from_another_model_by_the_fields_that_differ() {
    let asked = sample();
    let typo = Identity { revision: "x".to_owned(), ..sample() };
    let far = Identity {
        model: "other".to_owned(),
        tokenizer: "other".to_owned(),
        kv_dtype: "other".to_owned(),
        block_tokens: 7,
        ..sample()
    };
    assert_eq!(nearest(&asked, [&far, &asked].into_iter()), None);
    let near = nearest(&asked, [&far, &typo, &asked].into_iter()).unwrap();
    assert_eq!((near.at, near.differences.len()), (1, 1));
    assert_eq!(
        near.to_string(),
        format!("revision is \"x\" in the store but {:?} in the request", asked.revision)
    );
    let salted = Identity { tenant_salt: TenantSalt(vec![9]), ..sample() };
    assert!(asked.differences(&salted).is_empty(), "a salt is a secret");
    let mut more = sample();
    more.extras.insert("zz".to_owned(), "\u{e9}".repeat(40));
    let near = nearest(&asked, [&more].into_iter()).unwrap().to_string();
    assert!(
        near.starts_with("extras.zz is \"") && near.ends_with("... in the store but \"\" in the request"),
        "{near}"
    );
}
