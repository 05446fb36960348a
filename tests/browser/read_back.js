// Reads the page as laid out by the browser; the value of the last expression is returned as text.
(() => {
  const shown = (element) => element.getClientRects().length > 0;
  const middle = (element) => {
    const box = element.getBBox();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const charts = [...document.querySelectorAll('svg[data-chart]')].filter(shown).map((svg) => ({
    chart: svg.dataset.chart,
    scales: { x: svg.dataset.xScale, y: svg.dataset.yScale },
    title: svg.querySelector('title').textContent,
    about: svg.querySelector('desc').textContent,
    width: svg.getBoundingClientRect().width,
    font: Math.min(...[...svg.querySelectorAll('text')].map((text) => {
      const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
      return parseFloat(getComputedStyle(text).fontSize) * scale;
    })),
    ticks: [...svg.querySelectorAll('[data-axis]')].map((tick) => ({
      axis: tick.dataset.axis,
      value: Number(tick.dataset.value),
      at: tick.dataset.axis === 'x' ? middle(tick)[0] : middle(tick)[1],
    })),
    points: [...svg.querySelectorAll('[data-metric]')].map((point) => ({
      file: Number(point.dataset.file),
      row: Number(point.dataset.row),
      metric: point.dataset.metric,
      x: point.dataset.x,
      y: point.dataset.y,
      at: middle(point),
      title: point.querySelector('title').textContent,
    })),
    marks: [...svg.querySelectorAll('[data-mark]')].map((mark) => ({ name: mark.dataset.mark, y: mark.dataset.y })),
  }));
  const cells = [...document.querySelectorAll('table[data-file] td[data-metric]')].map((cell) => ({
    file: Number(cell.closest('table').dataset.file),
    row: Number(cell.closest('tr').dataset.row),
    metric: cell.dataset.metric,
    value: cell.dataset.value,
  }));
  const page = document.documentElement;
  return JSON.stringify({
    charts,
    cells,
    scripts: document.querySelectorAll('script, iframe, img, object, embed').length,
    banners: [...document.querySelectorAll('.banner')].map((banner) => banner.textContent),
    warnings: document.querySelectorAll('.warnings li').length,
    text: (document.body || page).textContent,
    width: { page: page.scrollWidth, screen: page.clientWidth },
  });
})()
