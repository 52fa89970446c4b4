extends "res://addons/envmanager/arena.gd"
# A bar moves over a picture of 32 x 32, one column per tick; agent `x` says where it should be. The bar is a Control in
# a viewport of its own, or a box in the world that a camera looks at.

var x: int = 0
var drawn: int = 0
var _end_at: int = 0

onready var eye: Viewport = $"../Eye"
onready var bar: Node = get_node("../Bar") if has_node("../Bar") else $"../Eye/Bar"


func _ready() -> void:
	VisualServer.connect("frame_post_draw", self, "_count")


func _count() -> void:
	drawn += 1


func reset(from: RandomNumberGenerator, options: Dictionary) -> void:
	_end_at = int(options.get("end_at", 0))
	_move(from.randi() % 32)


func observations() -> Array:
	var picture = {"name": "picture", "shape": [32, 32, 3], "dtype": "uint8", "low": 0, "high": 255}
	return [picture, {"name": "x", "shape": [1], "dtype": "int32", "low": 0, "high": 31}]


func observe() -> Array:
	return [picture(eye), PoolIntArray([x])]


func after_tick() -> void:
	_move((x + 1) % 32)
	if _end_at > 0 and x % _end_at == 0:
		end_episode()


func _move(to: int) -> void:
	x = to
	if bar is Spatial:
		bar.translation.x = x - 15.5
	else:
		bar.rect_position.x = x
