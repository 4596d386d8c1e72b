//! The status page: what `kvarts top` shows, in a browser, and beside it the segments, the last hour, prefixes and reads. Texts that
//! are part of the program; all figures are made in the browser from what is told beside them (`http.rs`), so no name is ever put
//! into a page's text by the server.

use super::answer::Answer;

/// The page may load only what comes from this server, and no other page may frame it.
const POLICY: &str = "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
                      referrer-policy: no-referrer\r\n";

/// The text at this path, if it is the page's.
pub(super) fn page(path: &[u8]) -> Option<Answer> {
    let (kind, body) = match path {
        b"/" => ("text/html; charset=utf-8", include_str!("page/index.html")),
        b"/page.css" => ("text/css; charset=utf-8", include_str!("page/page.css")),
        b"/figures.js" => ("text/javascript; charset=utf-8", include_str!("page/figures.js")),
        b"/inside.js" => ("text/javascript; charset=utf-8", include_str!("page/inside.js")),
        b"/page.js" => ("text/javascript; charset=utf-8", include_str!("page/page.js")),
        _ => return None,
    };
    Some(Answer { kind, ..Answer::plain("200 OK", body.to_owned()) }.with(POLICY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_no_script_or_style_of_its_own_that_its_policy_would_refuse() {
        let page = page(b"/").unwrap();
        assert!(page.more.contains("default-src 'none'") && !page.more.contains("unsafe"));
        assert!(
            !page.body.contains("<style") && !page.body.contains(" style=") && !page.body.contains(" on")
        );
        for script in page.body.split("<script").skip(1) {
            assert!(
                script.starts_with(" type=\"module\" src=\"/") && script.contains("\"></script>"),
                "{script}"
            );
        }
        assert!(!page.body.contains("http"), "it loads nothing from elsewhere");
    }

    #[test]
    fn nothing_is_put_into_the_page_as_markup() {
        for path in [&b"/page.js"[..], b"/figures.js", b"/inside.js"] {
            let script = page(path).unwrap().body;
            for way in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
            {
                assert!(!script.contains(way), "{way}");
            }
        }
    }
}
