@tool
extends Control
## Curves of the mean return of each behavior over agent steps, read from the file episodes.csv of a training run.

const AVERAGED := 100  # episodes, as in what `envmanager train` prints
const MOST := 400  # points of a curve; of more than that every other one is left out
const AT_ONCE := 1 << 18  # bytes
const COLORS: Array[Color] = [
	Color("4f9dff"), Color("ffb13d"), Color("6fd08c"), Color("e76f8a"), Color("b28dff"), Color("7fd6d6")
]

## Agent steps of the training when its last episode ended.
var steps := 0

var _path := ""
var _n_read := 0
var _curves := {}  # of each behavior


class Returns:
	var points := PackedVector2Array()
	var recent: Array[float] = []
	var every := 1  # episodes from one point to the next
	var n := 0

	func add(at: int, value: float) -> void:
		recent.append(value)
		if recent.size() > AVERAGED:
			recent.pop_front()
		n += 1
		if n % every == 0:
			points.append(Vector2(at, recent.reduce(func(a, b): return a + b) / recent.size()))
		if points.size() > MOST:
			var kept := PackedVector2Array()
			for i in range(1, points.size(), 2):
				kept.append(points[i])
			points = kept
			every *= 2


## Shows the run in this folder from its beginning.
func show_run(folder: String) -> void:
	_path = folder.path_join("episodes.csv")
	_n_read = 0
	steps = 0
	_curves = {}
	queue_redraw()


## Reads on, and returns whether there was anything.
func read() -> bool:
	var file := FileAccess.open(_path, FileAccess.READ)
	if file == null or file.get_length() <= _n_read:
		return false
	file.seek(_n_read)
	var bytes := file.get_buffer(mini(AT_ONCE, file.get_length() - _n_read))
	var whole := bytes.rfind(10) + 1
	for line in bytes.slice(0, whole).get_string_from_utf8().split("\n", false):
		# steps,seconds,behavior,env_id,agent_id,return,length; a comma in the name of a behavior is the only other one
		var cells := line.strip_edges().split(",")
		var n := cells.size()
		if n >= 7 and cells[0].is_valid_int() and cells[n - 2].is_valid_float():
			var behavior := ",".join(cells.slice(2, n - 4)).trim_prefix('"').trim_suffix('"')
			steps = cells[0].to_int()
			if not _curves.has(behavior):
				_curves[behavior] = Returns.new()
			_curves[behavior].add(steps, cells[n - 2].to_float())
	_n_read += whole
	queue_redraw()
	return whole > 0


## The mean return of the last episodes of each behavior.
func returns() -> Dictionary:
	var found := {}
	for behavior in _curves:
		if not _curves[behavior].points.is_empty():
			found[behavior] = _curves[behavior].points[-1].y
	return found


func _draw() -> void:
	var font := get_theme_default_font()
	var font_size := get_theme_default_font_size()
	var line_height := font.get_height(font_size)
	var gray := get_theme_color("font_color", "Label") * Color(1, 1, 1, 0.6)
	var found := returns()
	draw_rect(Rect2(Vector2.ZERO, size), gray * Color(1, 1, 1, 0.15))
	if found.is_empty():
		draw_string(font, Vector2(8, line_height), "return: no episode yet", HORIZONTAL_ALIGNMENT_LEFT, -1, font_size, gray)
		return
	var low := INF
	var high := -INF
	for curve in _curves.values():
		for point in curve.points:
			low = minf(low, point.y)
			high = maxf(high, point.y)
	var flat := 0.0 if high > low else maxf(absf(high), 1.0)
	var scales := [_text(low - flat), _text(high + flat)]
	var left := 12.0
	for scale_text in scales:
		left = maxf(left, font.get_string_size(scale_text, HORIZONTAL_ALIGNMENT_LEFT, -1, font_size).x + 8.0)
	var inside := Rect2(left, line_height * 1.3, size.x - left - 8.0, size.y - line_height * 2.6)
	draw_string(font, Vector2(4, inside.end.y), scales[0], HORIZONTAL_ALIGNMENT_LEFT, -1, font_size, gray)
	draw_string(font, Vector2(4, inside.position.y + line_height * 0.6), scales[1], HORIZONTAL_ALIGNMENT_LEFT, -1, font_size, gray)
	var told := "%s steps" % _with_commas(steps)
	draw_string(font, Vector2(0, size.y - 4), told, HORIZONTAL_ALIGNMENT_RIGHT, size.x - 8, font_size, gray)
	for y in [inside.position.y, inside.end.y]:
		draw_line(Vector2(inside.position.x, y), Vector2(inside.end.x, y), gray * Color(1, 1, 1, 0.4))
	var at := Vector2(inside.position.x, line_height)
	var number := 0
	for behavior in _curves:
		var color := COLORS[number % COLORS.size()]
		var drawn := PackedVector2Array()
		for point in _curves[behavior].points:
			var x: float = point.x / maxf(steps, 1.0)
			var y: float = (point.y - low + flat) / (high - low + 2.0 * flat)
			drawn.append(inside.position + inside.size * Vector2(x, 1.0 - y))
		if drawn.size() > 1:
			draw_polyline(drawn, color, 2.0, true)
		elif drawn.size() == 1:
			draw_circle(drawn[0], 2.0, color)
		if found.has(behavior):
			var name := "%s %s" % [behavior, _text(found[behavior])]
			draw_string(font, at, name, HORIZONTAL_ALIGNMENT_LEFT, -1, font_size, color)
			at.x += font.get_string_size(name + "   ", HORIZONTAL_ALIGNMENT_LEFT, -1, font_size).x
		number += 1


static func _text(number: float) -> String:
	return String.num(number, clampi(2 - floori(log(maxf(absf(number), 1e-9)) / log(10.0)), 0, 3))


static func _with_commas(number: int) -> String:
	var digits := str(number)
	for i in range(digits.length() - 3, 0, -3):
		digits = digits.insert(i, ",")
	return digits
