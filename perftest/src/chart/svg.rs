//! A chart drawn as SVG.
//!
//! Colors are attributes, which any viewer shows; a page's style sheet overrides them by class, for
//! its dark mode. Numbers are in `data-` attributes of the points and ticks.

use std::fmt::Write;

use super::text::{escape, width};
use super::{Chart, MAX_SERIES, Mark, Point, Series};

/// Colors of series on white, distinguishable with color blindness; markers differ, too.
const COLOURS: [&str; MAX_SERIES] = [
    "#0b63ce", "#d9480f", "#0a8a5f", "#8f3fbf", "#a87900", "#c2255c", "#0b7f9e", "#5c6470",
];
const DARK: [&str; MAX_SERIES] = [
    "#6cb0ff", "#ff9a5c", "#4fd1a1", "#cf9bff", "#f0c24b", "#ff8bb3", "#5fd0ea", "#aab4c0",
];
const INK: &str = "#1c2330";
const MUTED: &str = "#5b6675";
const GRID: &str = "#e3e7ec";
const FONT: &str = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif";

/// Style sheet variables for light mode and for dark mode, and the rules that use them.
pub(crate) const STYLES: fn() -> (String, String, String) = || {
    let variables = |colours: &[&str], ink: &str, muted: &str, grid: &str, paper: &str| {
        let mut text = format!("--ink:{ink};--muted:{muted};--grid:{grid};--paper:{paper};");
        for (index, colour) in colours.iter().enumerate() {
            let _ = write!(text, "--s{index}:{colour};");
        }
        text
    };
    let mut rules = String::from(
        ".ink{fill:var(--ink)}.muted{fill:var(--muted)}.grid{stroke:var(--grid)}.axis{stroke:var(--muted)}.paper{fill:var(--paper)}.mark{stroke:var(--ink)}.ring,.halo{stroke:var(--paper)}",
    );
    for index in 0..MAX_SERIES {
        let _ = write!(
            rules,
            ".l{index}{{stroke:var(--s{index})}}.f{index}{{fill:var(--s{index})}}"
        );
    }
    (
        variables(&COLOURS, INK, MUTED, GRID, "#ffffff"),
        variables(&DARK, "#e8edf4", "#a3afbe", "#2c3440", "#161b22"),
        rules,
    )
};

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Layout {
    pub(crate) name: &'static str,
    width: f64,
    plot: f64,
    font: f64,
    left: f64,
    ticks: (usize, usize),
    marker: f64,
    /// Whether title, device and version are drawn, where the page does not have them.
    alone: bool,
    /// Whether it brings a style sheet along, by which it has a dark side; what makes pixels of it
    /// has no use for one.
    styled: bool,
}

impl Layout {
    pub(crate) const WIDE: Layout = Layout {
        name: "wide",
        width: 1000.0,
        plot: 330.0,
        font: 13.0,
        left: 84.0,
        ticks: (24, 9),
        marker: 1.0,
        alone: false,
        styled: false,
    };
    pub(crate) const NARROW: Layout = Layout {
        name: "narrow",
        width: 360.0,
        plot: 250.0,
        font: 12.0,
        left: 66.0,
        ticks: (7, 7),
        marker: 0.75,
        alone: false,
        styled: false,
    };
    /// For a file.
    pub(crate) const ALONE: Layout = Layout {
        name: "alone",
        plot: 380.0,
        alone: true,
        styled: true,
        ..Layout::WIDE
    };
    /// For a raster.
    #[cfg(any(test, feature = "png"))]
    pub(crate) const PICTURE: Layout = Layout {
        name: "picture",
        styled: false,
        ..Layout::ALONE
    };
}

pub(crate) fn draw(chart: &Chart, layout: &Layout) -> String {
    let mut canvas = Canvas {
        out: String::new(),
        layout: *layout,
        top: 8.0,
    };
    if layout.alone {
        canvas.head(chart);
    }
    canvas.legend(chart);
    canvas.plot(chart);
    let height = canvas.top;
    let id = format!("{}-{}", escape(&chart.id), layout.name);
    let (light, dark, rules) = STYLES();
    let style = if layout.styled {
        // Not in `:root`, which would be the page's where the file is inlined.
        format!(
            "<style>.doorbell-chart{{{light}}}@media (prefers-color-scheme:dark){{.doorbell-chart{{{dark}}}}}{rules}</style>"
        )
    } else {
        String::new()
    };
    let w = layout.width;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"doorbell-chart {}\" viewBox=\"0 0 {w} {height:.0}\" width=\"{w}\" height=\"{height:.0}\" role=\"img\" \
         aria-labelledby=\"{id}-t {id}-d\" font-family=\"{FONT}\" font-size=\"{}\" data-chart=\"{}\" data-x-scale=\"{}\" data-y-scale=\"{}\">\
         <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>{style}{}</svg>\n",
        layout.name,
        layout.font,
        escape(&chart.id),
        chart.x.scale.name(),
        chart.y.scale.name(),
        escape(&chart.title),
        escape(&chart.about),
        canvas.out
    )
}

struct Canvas {
    out: String,
    layout: Layout,
    top: f64,
}

impl Canvas {
    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = self.out.write_fmt(text);
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, size: f64, text: &str) {
        let fill = if class == "muted" { MUTED } else { INK };
        self.put(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\" fill=\"{fill}\" font-size=\"{size}\">{}</text>",
            escape(text)
        ));
    }

    fn head(&mut self, chart: &Chart) {
        let Layout { width: w, font, .. } = self.layout;
        self.put(format_args!(
            "<rect class=\"paper\" fill=\"#ffffff\" width=\"{w}\" height=\"2000\"/>"
        ));
        self.top = 34.0;
        self.text(24.0, self.top, "start", "ink", font + 9.0, &chart.title);
        self.top += 8.0;
        for source in &chart.sources {
            self.top += font + 6.0;
            self.text(24.0, self.top, "start", "muted", font, source);
        }
        self.top += 12.0;
        if let Some(banner) = &chart.banner {
            let top = self.top;
            self.put(format_args!(
                "<rect x=\"24\" y=\"{:.1}\" width=\"{:.1}\" height=\"28\" rx=\"6\" fill=\"#ffe8a3\" stroke=\"#b58100\"/>\
                 <text x=\"36\" y=\"{:.1}\" fill=\"#4d3800\" font-weight=\"bold\">{}</text>",
                top,
                w - 48.0,
                top + 19.0,
                escape(banner)
            ));
            self.top += 38.0;
        }
    }

    /// Names of the series, in as many lines as they need.
    fn legend(&mut self, chart: &Chart) {
        let Layout { width: w, font, .. } = self.layout;
        let (begin, mut x) = (16.0, 16.0);
        let mut y = self.top + font;
        for series in &chart.series {
            let name = shorten(&series.name, (w - 2.0 * begin - 40.0) / font);
            let wide = 34.0 + width(&name) * font + 18.0;
            if x > begin && x + wide > w - 8.0 {
                x = begin;
                y += font + 9.0;
            }
            self.line_of(series, &format!("M{x:.1} {:.1}h26", y - 4.0));
            if !series.is_curve {
                self.marker(series.style, x + 13.0, y - 4.0, "");
            }
            self.text(x + 34.0, y, "start", "ink", font, &name);
            x += wide;
        }
        self.top = y + 14.0;
    }

    fn plot(&mut self, chart: &Chart) {
        let Layout {
            width: w,
            plot,
            font,
            left,
            ticks,
            ..
        } = self.layout;
        // The y axis label is above the axis, horizontal.
        self.text(8.0, self.top + font, "start", "muted", font, &chart.y.label);
        let (top, right) = (self.top + font + 16.0, w - 18.0);
        let bottom = top + plot;
        let at_x = |value: f64| left + 8.0 + chart.x.scale.place(value) * (right - left - 16.0);
        let at_y = |value: f64| bottom - chart.y.scale.place(value) * plot;
        for tick in chart.y.scale.ticks(ticks.1) {
            let y = at_y(tick);
            self.put(format_args!(
                "<path class=\"grid\" stroke=\"{GRID}\" fill=\"none\" d=\"M{left:.1} {y:.1}H{right:.1}\" data-axis=\"y\" data-value=\"{tick}\" data-at=\"{y:.3}\"/>"
            ));
            self.text(
                left - 8.0,
                y + font * 0.35,
                "end",
                "muted",
                font,
                &chart.y.unit.tick(tick),
            );
        }
        for tick in chart.x.scale.ticks(ticks.0) {
            let x = at_x(tick);
            self.put(format_args!(
                "<path class=\"axis\" stroke=\"{MUTED}\" fill=\"none\" d=\"M{x:.1} {bottom:.1}v5\" data-axis=\"x\" data-value=\"{tick}\" data-at=\"{x:.3}\"/>"
            ));
            self.text(
                x,
                bottom + font + 8.0,
                "middle",
                "muted",
                font,
                &chart.x.unit.tick(tick),
            );
        }
        self.put(format_args!(
            "<path class=\"axis\" stroke=\"{MUTED}\" fill=\"none\" d=\"M{left:.1} {bottom:.1}H{right:.1}\"/>"
        ));
        let middle = f64::midpoint(left, right);
        self.text(
            middle,
            bottom + 2.0 * font + 16.0,
            "middle",
            "muted",
            font,
            &chart.x.label,
        );
        self.marks(chart, &at_y, right);
        for series in &chart.series {
            let mut path = String::new();
            for (index, point) in series.points.iter().enumerate() {
                let letter = if index == 0 { 'M' } else { 'L' };
                let _ = write!(path, "{letter}{:.2} {:.2}", at_x(point.x), at_y(point.y));
            }
            self.line_of(series, &path);
            for point in &series.points {
                let x = at_x(point.x);
                if let Some(half) = point.half_width.filter(|half| *half > 0.0) {
                    let (low, high) = (at_y((point.y - half).max(0.0)), at_y(point.y + half));
                    let style = series.style % MAX_SERIES;
                    // An interval that continues beyond the chart has no cap.
                    let end = if chart.y.scale.place(point.y + half) < 1.0 {
                        "m-4 0h8"
                    } else {
                        ""
                    };
                    self.put(format_args!(
                        "<path class=\"l{style}\" stroke=\"{}\" stroke-width=\"1.5\" fill=\"none\" d=\"M{x:.2} {low:.2}V{high:.2}{end}M{:.2} {low:.2}h8\"/>",
                        COLOURS[style],
                        x - 4.0
                    ));
                }
                self.point(chart, series, point, x, at_y(point.y));
            }
        }
        self.names(chart, &at_y, right, top);
        self.top = bottom + 2.0 * font + 26.0;
    }

    fn marks(&mut self, chart: &Chart, at_y: &impl Fn(f64) -> f64, right: f64) {
        let left = self.layout.left;
        for mark in &chart.marks {
            let y = at_y(mark.value);
            let (dash, thick) = if mark.is_line_rate { ("9 4", 2.0) } else { ("3 4", 1.5) };
            self.put(format_args!(
                "<path class=\"mark\" stroke=\"{INK}\" stroke-width=\"{thick}\" stroke-dasharray=\"{dash}\" fill=\"none\" d=\"M{left:.1} {y:.2}H{right:.1}\" \
                 data-mark=\"{0}\" data-y=\"{1}\"><title>{0}: {2}</title></path>",
                escape(&mark.name),
                escape(&mark.written),
                escape(&chart.y.unit.show(mark.value))
            ));
        }
    }

    /// The names of the lines, on top of everything; at the right where two would overlap.
    fn names(&mut self, chart: &Chart, at_y: &impl Fn(f64) -> f64, right: f64, top: f64) {
        let Layout { font, left, .. } = self.layout;
        let mut marks: Vec<&Mark> = chart.marks.iter().collect();
        marks.sort_by(|a, b| b.value.total_cmp(&a.value));
        // y coordinate and width of the last name on each side.
        let mut taken = [(f64::NEG_INFINITY, 0.0); 2];
        for mark in marks {
            let y = at_y(mark.value);
            let size = font - 1.0;
            let name = format!("{}: {}", mark.name, chart.y.unit.show(mark.value));
            let name = shorten(&name, (right - left - 8.0) / size);
            // Below the line where there is no space above it.
            let place = if y - size < top - 4.0 { y + size + 2.0 } else { y - 5.0 };
            let width = width(&name) * size;
            let apart = |side: usize| place - taken[side].0 >= size + 2.0;
            let beside = |side: usize| width + taken[side].1 + size <= right - left;
            let room = |side: usize| apart(side) && (apart(1 - side) || beside(1 - side));
            let side = match (room(0), room(1) && self.layout.name != Layout::NARROW.name) {
                (true, _) => 0,
                (false, true) => 1,
                // The line has its name in its tooltip, and the page in its table.
                (false, false) => continue,
            };
            taken[side] = (place, width);
            let (x, anchor) = if side == 0 {
                (left + 4.0, "start")
            } else {
                (right, "end")
            };
            self.put(format_args!(
                "<text x=\"{x:.1}\" y=\"{place:.1}\" text-anchor=\"{anchor}\" class=\"ink halo\" fill=\"{INK}\" stroke=\"#ffffff\" stroke-width=\"3\" \
                 stroke-linejoin=\"round\" paint-order=\"stroke\" font-size=\"{size}\">{}</text>",
                escape(&name)
            ));
        }
    }

    fn line_of(&mut self, series: &Series, path: &str) {
        let style = series.style % MAX_SERIES;
        let dash = if series.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
        self.put(format_args!(
            "<path class=\"l{style}\" stroke=\"{}\" stroke-width=\"2.25\" stroke-linejoin=\"round\" fill=\"none\"{dash} d=\"{path}\"/>",
            COLOURS[style]
        ));
    }

    /// A marker of the series' shape, with the child elements `inside`.
    fn marker(&mut self, style: usize, x: f64, y: f64, inside: &str) {
        let style = style % MAX_SERIES;
        let size = self.layout.marker;
        let (round, half, tall, wide) = (4.2 * size, 3.7 * size, 5.0 * size, 4.8 * size);
        let shape = match style % 4 {
            0 => format!(
                "M{:.2} {y:.2}a{round} {round} 0 1 0 {:.2} 0a{round} {round} 0 1 0-{:.2} 0z",
                x - round,
                2.0 * round,
                2.0 * round
            ),
            1 => format!("M{:.2} {:.2}h{2:.2}v{2:.2}h-{2:.2}z", x - half, y - half, 2.0 * half),
            2 => format!(
                "M{x:.2} {:.2}l{wide:.2} {:.2}h-{:.2}z",
                y - tall,
                8.2 * size,
                2.0 * wide
            ),
            _ => format!(
                "M{x:.2} {:.2}l{tall:.2} {tall:.2}l-{tall:.2} {tall:.2}l-{tall:.2}-{tall:.2}z",
                y - tall
            ),
        };
        self.put(format_args!(
            "<path class=\"f{style} ring\" fill=\"{}\" stroke=\"#ffffff\" stroke-width=\"1.25\" d=\"{shape}\"{inside}",
            COLOURS[style]
        ));
        if inside.is_empty() {
            self.out.push_str("/>");
        }
    }

    /// A marker with its values; of a curve an invisible one, for the tooltip.
    fn point(&mut self, chart: &Chart, series: &Series, point: &Point, x: f64, y: f64) {
        let (x_shown, y_shown) = (chart.x.unit.show(point.x), chart.y.unit.show(point.y));
        let interval = point
            .half_width
            .map_or_else(String::new, |half| format!(" ± {}", chart.y.unit.show(half)));
        let inside = format!(
            " data-file=\"{}\" data-row=\"{}\" data-metric=\"{}\" data-x=\"{}\" data-y=\"{}\" data-at=\"{x:.3} {y:.3}\"><title>{}: {} at {}{}</title></path>",
            point.file,
            point.row,
            point.metric,
            escape(&point.written.0),
            escape(&point.written.1),
            escape(&series.name),
            escape(&y_shown),
            escape(&x_shown),
            escape(&interval)
        );
        if series.is_curve {
            self.put(format_args!(
                "<path class=\"dot\" fill=\"#000000\" fill-opacity=\"0\" d=\"M{:.2} {y:.2}a4 4 0 1 0 8 0a4 4 0 1 0-8 0z\"{inside}",
                x - 4.0
            ));
        } else {
            self.marker(series.style, x, y, &inside);
        }
    }
}

/// A text shortened to `most` times its font size.
fn shorten(text: &str, most: f64) -> String {
    if width(text) <= most {
        return text.to_owned();
    }
    let mut short = String::new();
    for c in text.chars() {
        short.push(c);
        if width(&short) + 1.0 > most {
            break;
        }
    }
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::charts;
    use crate::document::tests::document;

    #[test]
    fn numbers_are_in_it_to_the_digit_and_text_is_only_text() {
        let mut evil = document(
            "<script>.json",
            "soft-local",
            r#"{"bytes":64,"bw_avg_bytes_per_s":123456789.012345,"msg_rate_per_s":2.5},{"bytes":4096,"bw_avg_bytes_per_s":3e9,"msg_rate_per_s":1}"#,
        );
        evil.device = "\"><img src=x onerror=alert(1)>&'".into();
        for chart in charts(&[evil]) {
            for layout in [Layout::WIDE, Layout::NARROW, Layout::ALONE, Layout::PICTURE] {
                let svg = draw(&chart, &layout);
                assert!(!svg.contains("<script") && !svg.contains("<img"), "{svg}");
                let wanted = match chart.kind {
                    "bandwidth" => "data-y=\"123456789.012345\"",
                    _ => "data-y=\"2.5\"",
                };
                assert!(svg.contains(wanted), "{svg}");
                assert_eq!(layout.alone, svg.contains("not an RDMA adapter"), "{}", chart.kind);
                roxmltree::Document::parse(&svg).expect(&svg);
            }
        }
    }

    #[test]
    fn text_is_shortened_to_its_room() {
        assert_eq!(shorten("short", 10.0), "short");
        let long = shorten(&"x".repeat(100), 10.0);
        assert!(long.ends_with('…') && width(&long) <= 11.0, "{long}");
    }
}
