extends "res://addons/envmanager/agent.gd"
## The one who chases: two numbers say where it wants to go, and it takes a while to turn.
##
## It feels the coin with 8 rays around it. A ray is the higher, the nearer the coin is and the straighter it points
## there; between two rays both feel it.

const WIDTH := 400.0
const SPEED := 200.0
const TURN := 0.1  # of the way to the wanted velocity in one tick
const RAYS := 8
const FAR := 600.0

var velocity := Vector2.ZERO
var wanted := Vector2.ZERO

@onready var body: Node2D = get_parent()
@onready var coin: Node2D = $"../../Coin"


func begin_at(start: Vector2) -> void:
	body.position = start
	velocity = Vector2.ZERO
	wanted = Vector2.ZERO


func observe() -> PackedFloat32Array:
	var seen := PackedFloat32Array([0, 0, 0, 0, 0, 0, 0, 0])
	var to := coin.position - body.position
	var direction := fposmod(to.angle() / TAU * RAYS, RAYS)
	var ray := int(direction)
	var nearness := maxf(0.0, 1 - to.length() / FAR)
	seen[ray % RAYS] = nearness * (1 - (direction - ray))
	seen[(ray + 1) % RAYS] = nearness * (direction - ray)
	seen.append(2 * body.position.x / WIDTH - 1)
	seen.append(2 * body.position.y / WIDTH - 1)
	seen.append(velocity.x / SPEED)
	seen.append(velocity.y / SPEED)
	return seen


func act(continuous: PackedFloat32Array, _discrete: PackedInt32Array) -> void:
	wanted = (SPEED * Vector2(continuous[0], continuous[1])).limit_length(SPEED)


func heuristic() -> void:
	var to := Input.get_vector("ui_left", "ui_right", "ui_up", "ui_down")
	if not has_window():
		to = (coin.position - body.position).normalized()
	act(PackedFloat32Array([to.x, to.y]), PackedInt32Array())


func _physics_process(delta: float) -> void:
	velocity += (wanted - velocity) * TURN
	var next := body.position + velocity * delta
	body.position = next.clamp(Vector2.ZERO, Vector2(WIDTH, WIDTH))
