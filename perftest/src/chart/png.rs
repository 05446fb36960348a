//! A chart as PNG: the drawing of `svg`, with a built-in font, as a server may have none.

use std::sync::Arc;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::fontdb::Database;
use resvg::usvg::{Options, Tree};

/// Pixels for each unit of the drawing: enough for a screen of fine pixels.
const SCALE: f32 = 2.0;

/// # Errors
/// One line, when it is no SVG or there is no memory for so many pixels.
pub(crate) fn png(svg: &str) -> Result<Vec<u8>, String> {
    let mut fonts = Database::new();
    fonts.load_font_data(dejavu::sans::regular().to_vec());
    fonts.load_font_data(dejavu::sans::bold().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    let options = Options {
        fontdb: Arc::new(fonts),
        font_family: "DejaVu Sans".into(),
        ..Options::default()
    };
    let tree = Tree::from_str(svg, &options).map_err(|e| e.to_string())?;
    let size = tree
        .size()
        .to_int_size()
        .scale_by(SCALE)
        .ok_or("the drawing has no size")?;
    let mut pixels = Pixmap::new(size.width(), size.height()).ok_or("there is no memory for it")?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use resvg::tiny_skia::PremultipliedColorU8;

    use super::*;
    use crate::chart::{Layout, charts, draw};
    use crate::document::tests::document;

    #[test]
    fn a_chart_is_dark_on_white() {
        let rows = r#"{"bytes":64,"bw_avg_bytes_per_s":1e9,"msg_rate_per_s":2},{"bytes":128,"bw_avg_bytes_per_s":2e9,"msg_rate_per_s":2}"#;
        let made = charts(&[document("a.json", "hardware", rows)]);
        let pixels = Pixmap::decode_png(&png(&draw(&made[0], &Layout::PICTURE)).unwrap()).unwrap();
        let white = |pixel: &&PremultipliedColorU8| pixel.red() == 255 && pixel.green() == 255 && pixel.blue() == 255;
        let of = pixels.pixels().iter().filter(white).count() as f64 / pixels.pixels().len() as f64;
        assert!((0.8..0.99).contains(&of), "{of}");
    }

    #[test]
    fn text_and_lines_become_pixels() {
        let svg = |inside: &str| {
            format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 40 20\" width=\"40\" height=\"20\">{inside}</svg>"
            )
        };
        let empty = png(&svg("")).unwrap();
        assert_eq!(empty[..8], *b"\x89PNG\r\n\x1a\n");
        // Width and height, in the header that comes first.
        assert_eq!(empty[16..24], [0, 0, 0, 80, 0, 0, 0, 40]);
        let text = png(&svg(
            "<text y=\"15\" font-family=\"system-ui,sans-serif\" font-size=\"12\">GB/s</text>",
        ));
        assert!(text.unwrap().len() > empty.len() + 100);
        assert!(png("<svg").is_err());
    }
}
